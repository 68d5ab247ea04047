//! `doctor`: what this machine has for training, and what is missing.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Parser;
use gpurun_device::{
    CudaBackend, CudaLibrary, Gpu, HostLink, PeerLink, check_host_link, check_peer_link, cuda_gpus, cuda_libraries,
    cudnn_library, nccl_library,
};
use gpurun_types::Bytes;
use serde_json::{Value, json};

use crate::command::{Failure, command, print};
use crate::host::{HostMemory, MemoryLimit, host_memory};

/// Show driver, libraries, GPUs, links, memory and disk, and what is missing
#[derive(Parser, Debug)]
#[command(name = "doctor", max_term_width = 110)]
struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Folder whose disk is looked at
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
}

/// `doctor` with these arguments; the process's exit code: 2 when something that is there does not work.
pub fn doctor_main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> u8 {
    command::<DoctorArgs>("doctor", arguments, |args| {
        let report = Report::take(&args.out)?;
        print(&if args.json { format!("{}\n", report.json()) } else { report.text() });
        match report.faults().as_slice() {
            [] => Ok(()),
            faults => Err(Failure::new(2, format!("found wrong: {}", faults.join("; ")))),
        }
    })
}

/// What was found of one GPU that was opened.
struct Opened {
    free: Result<Bytes, String>,
    link: Result<HostLink, String>,
}

struct Report {
    processor: String,
    threads: usize,
    memory: HostMemory,
    folder: PathBuf,
    disk: Disk,
    cache: Result<PathBuf, String>,
    libraries: Vec<CudaLibrary>,
    gpus: Result<Vec<Gpu>, String>,
    /// One for each GPU, or why it cannot be used.
    opened: Vec<Result<Opened, String>>,
    /// From, to, and the link.
    peers: Vec<(usize, usize, Result<PeerLink, String>)>,
}

struct Disk {
    free: Bytes,
    total: Bytes,
}

impl Report {
    fn take(folder: &Path) -> Result<Self, Failure> {
        let disk = disk(folder).map_err(|e| Failure::new(2, format!("--out {}: {e}", folder.display())))?;
        let mut libraries = cuda_libraries();
        libraries.extend([cudnn_library(), nccl_library()]);
        // NVRTC brings its own part with it, found or not.
        libraries.retain(|library| library.name != "nvrtc-builtins");
        let gpus = cuda_gpus().map_err(|e| e.to_string());
        let count = gpus.as_ref().map_or(0, Vec::len);
        let backends: Vec<_> = (0..count).map(|i| CudaBackend::new(i as u32, 1).map_err(|e| e.to_string())).collect();
        Ok(Self {
            processor: processor(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory: host_memory().map_err(|e| Failure::new(2, e.to_string()))?,
            folder: folder.to_owned(),
            disk,
            cache: cache(),
            libraries,
            opened: backends.iter().map(open).collect(),
            peers: peers(&backends),
            gpus,
        })
    }

    /// What is there and does not work. That something is not there is no fault.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        faults.extend(self.cache.as_ref().err().cloned());
        let broken = self.libraries.iter().filter(|library| library.path.is_some() && library.error.is_some());
        faults.extend(broken.filter_map(CudaLibrary::fault));
        for (index, opened) in self.opened.iter().enumerate() {
            let fault = match opened {
                Ok(Opened { free: Err(fault), .. } | Opened { link: Err(fault), .. }) | Err(fault) => fault,
                Ok(_) => continue,
            };
            faults.push(format!("GPU {index}: {fault}"));
        }
        for (from, to, link) in &self.peers {
            faults.extend(link.as_ref().err().map(|fault| format!("GPU {from} to GPU {to}: {fault}")));
        }
        faults
    }

    fn json(&self) -> Value {
        let libraries = self.libraries.iter().map(|library| {
            let CudaLibrary { name, path, version, error } = library;
            let remedy = (!library.is_loaded()).then(|| library.remedy());
            json!({ "name": name, "path": path, "version": version, "error": error, "remedy": remedy })
        });
        let peers = self.peers.iter().map(|(from, to, link)| match link {
            Ok(PeerLink { direct, rate }) => {
                json!({ "from": from, "to": to, "direct": direct, "bytes_per_second": rate })
            }
            Err(fault) => json!({ "from": from, "to": to, "error": fault }),
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "processor": self.processor,
            "threads": self.threads,
            "memory": {
                "total": self.memory.total.0,
                "available": self.memory.available.0,
                "limit": self.memory.limit.as_ref().map(|l| l.limit.0),
            },
            "disk": { "folder": self.folder, "free": self.disk.free.0, "total": self.disk.total.0 },
            "cache": { "folder": self.cache.as_ref().ok(), "error": self.cache.as_ref().err() },
            "libraries": libraries.collect::<Vec<_>>(),
            "gpus": self.gpus_json(),
            "gpus_error": self.gpus.as_ref().err(),
            "peers": peers.collect::<Vec<_>>(),
            "faults": self.faults(),
        })
    }

    fn gpus_json(&self) -> Vec<Value> {
        let gpus = self.gpus.as_ref().map_or(&[][..], Vec::as_slice);
        let each = gpus.iter().zip(&self.opened).map(|(gpu, opened)| {
            let free = opened.as_ref().ok().and_then(|o| o.free.as_ref().ok());
            let link = opened.as_ref().ok().and_then(|o| o.link.as_ref().ok());
            json!({
                "name": gpu.name,
                "compute_capability": format!("{}.{}", gpu.capability.0, gpu.capability.1),
                "memory": gpu.memory.0,
                "free": free.map(|b| b.0),
                "pci": gpu.pci,
                "host_to_device_bytes_per_second": link.map(|l| l.up),
                "device_to_host_bytes_per_second": link.map(|l| l.down),
                "error": opened.as_ref().err(),
            })
        });
        each.collect()
    }

    fn text(&self) -> String {
        let mut text = format!("gpurun     {}\n", env!("CARGO_PKG_VERSION"));
        let mut line = |name: &str, rest: String| {
            // A name that goes on in a second line is said once.
            let _ = writeln!(text, "{name:<10} {}", rest.trim_end());
        };
        line("processor", format!("{}, {} threads for this process", self.processor, self.threads));
        line("memory", self.memory_words());
        let Disk { free, total } = self.disk;
        line("disk", format!("{free} free of {total} in {}", self.folder.display()));
        line(
            "cache",
            match &self.cache {
                Ok(folder) => format!("{}, writable", folder.display()),
                Err(fault) => format!("NOT USABLE: {fault}"),
            },
        );
        for library in &self.libraries {
            line(shown(library.name), library_words(library));
        }
        match &self.gpus {
            Err(_) => line("GPUs", "none: there is no driver".to_owned()),
            Ok(gpus) if gpus.is_empty() => line("GPUs", "none that this process may use".to_owned()),
            Ok(gpus) => {
                for (index, (gpu, opened)) in gpus.iter().zip(&self.opened).enumerate() {
                    line(&format!("GPU {index}"), gpu_words(gpu, opened));
                }
            }
        }
        for (from, to, link) in &self.peers {
            line(&format!("GPU {from} to {to}"), peer_words(link));
        }
        let wheels: Vec<_> = self.libraries.iter().filter(|l| !l.is_loaded()).filter_map(CudaLibrary::wheel).collect();
        if !wheels.is_empty() {
            line("missing", format!("`python3 -m pip install {}` brings it", wheels.join(" ")));
        }
        line("so", self.verdict());
        text
    }

    fn memory_words(&self) -> String {
        let HostMemory { total, available, limit } = &self.memory;
        let mut words = format!("{total}, {available} available");
        if let Some(MemoryLimit { group, limit, used }) = limit {
            words += &format!("; {} allows {limit}, of which {used} are used", group.display());
        }
        words
    }

    /// What a user can do here.
    fn verdict(&self) -> String {
        let usable = self.opened.iter().filter(|opened| opened.is_ok()).count();
        match (usable, self.gpus.as_ref().map_or(0, Vec::len)) {
            (0, 0) => "train on the CPU (--device cpu, which --device auto takes here)".to_owned(),
            (0, _) => "train on the CPU until what is missing for the GPUs is there".to_owned(),
            (1, _) => "train on one GPU (--device cuda)".to_owned(),
            (n, _) => format!("train on up to {n} GPUs (gpurun --nproc {n} train)"),
        }
    }
}

fn open(backend: &Result<CudaBackend, String>) -> Result<Opened, String> {
    let backend = backend.as_ref().map_err(String::clone)?;
    let free = backend.device_memory().map(|(free, _)| free).map_err(|e| e.to_string());
    Ok(Opened { free, link: check_host_link(backend).map_err(|e| e.to_string()) })
}

/// Every ordered pair of GPUs that could be opened.
fn peers(backends: &[Result<CudaBackend, String>]) -> Vec<(usize, usize, Result<PeerLink, String>)> {
    let usable: Vec<_> = backends.iter().enumerate().filter_map(|(i, b)| b.as_ref().ok().map(|b| (i, b))).collect();
    let pairs = usable.iter().flat_map(|from| usable.iter().map(move |to| (from, to)));
    let pairs = pairs.filter(|(from, to)| from.0 != to.0);
    pairs.map(|(from, to)| (from.0, to.0, check_peer_link(from.1, to.1).map_err(|e| e.to_string()))).collect()
}

fn shown(library: &str) -> &str {
    match library {
        "cuda" => "driver",
        "nvrtc" => "NVRTC",
        "cublasLt" => "cuBLASLt",
        "cudnn" => "cuDNN",
        "nccl" => "NCCL",
        other => other,
    }
}

/// What a run lacks without the library.
fn purpose(library: &str) -> &'static str {
    match library {
        "cuda" => "; it comes with NVIDIA's driver, without which gpurun runs on the CPU",
        "nvrtc" | "cublasLt" => "; gpurun uses no GPU without it",
        "cudnn" => "; attention runs on gpurun's own kernels without it",
        "nccl" => "; several GPUs talk through host memory without it, which is slow",
        _ => "",
    }
}

fn library_words(library: &CudaLibrary) -> String {
    match library.fault() {
        Some(fault) if library.path.is_some() => format!("{fault}{}", purpose(library.name)),
        Some(_) => format!("not found{}", purpose(library.name)),
        None => {
            let version = library.version.as_deref().unwrap_or("version unknown");
            format!("{version}, {}", library.path.as_deref().unwrap_or(Path::new("")).display())
        }
    }
}

fn gpu_words(gpu: &Gpu, opened: &Result<Opened, String>) -> String {
    let (major, minor) = gpu.capability;
    let mut words = format!("{}, compute capability {major}.{minor}, {}, PCI {}", gpu.name, gpu.memory, gpu.pci);
    match opened {
        Err(fault) => words += &format!("; CANNOT BE USED: {fault}"),
        Ok(Opened { free, link }) => {
            words += &match free {
                Ok(free) => format!("; {free} free"),
                Err(fault) => format!("; DOES NOT ANSWER: {fault}"),
            };
            words += &match link {
                Ok(HostLink { up, down }) => format!("; host to device {}, back {}", rate(*up), rate(*down)),
                Err(fault) => format!("; HOST LINK FAILS: {fault}"),
            };
        }
    }
    words
}

fn peer_words(link: &Result<PeerLink, String>) -> String {
    match link {
        Ok(PeerLink { direct: true, rate: speed }) => format!("{}, directly; bytes came over unharmed", rate(*speed)),
        Ok(PeerLink { rate: speed, .. }) => format!("{}, through the host; bytes came over unharmed", rate(*speed)),
        Err(fault) => format!("FAILS: {fault}"),
    }
}

fn rate(bytes_per_second: f64) -> String {
    format!("{:.1} GB/s", bytes_per_second / 1e9)
}

/// The processor's name and the vector instructions that the CPU backend uses.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, name)| name);
    let name = name.map_or_else(|| std::env::consts::ARCH.to_owned(), |name| name.trim().to_owned());
    format!("{name} ({})", vectors())
}

#[cfg(target_arch = "x86_64")]
fn vectors() -> &'static str {
    if std::arch::is_x86_feature_detected!("avx512f") {
        "AVX-512"
    } else if std::arch::is_x86_feature_detected!("avx2") {
        "AVX2"
    } else {
        "no AVX2: slow"
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn vectors() -> &'static str {
    std::env::consts::ARCH
}

fn disk(folder: &Path) -> std::io::Result<Disk> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(Disk { free: Bytes(found.f_bavail * found.f_frsize), total: Bytes(found.f_blocks * found.f_frsize) })
}

/// The folder of caches, in which a file was written and removed again.
fn cache() -> Result<PathBuf, String> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let folder = cache.ok_or("neither XDG_CACHE_HOME nor HOME says where caches belong")?.join("gpurun");
    let probe = folder.join(format!("doctor.{}", std::process::id()));
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&probe, [0; 4096]));
    let removed = std::fs::remove_file(&probe);
    written
        .and(removed)
        .map_err(|e| format!("{} cannot be written: {e}; XDG_CACHE_HOME names another", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(name: &'static str, path: Option<&str>, error: Option<&str>) -> CudaLibrary {
        CudaLibrary { name, path: path.map(Into::into), version: Some("1.2".into()), error: error.map(Into::into) }
    }

    fn report(libraries: Vec<CudaLibrary>, opened: Vec<Result<Opened, String>>) -> Report {
        let gpu = Gpu {
            id: [0; 16],
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            memory: Bytes(140 << 30),
            pci: "0000:3b:00.0".into(),
        };
        Report {
            processor: "a processor".into(),
            threads: 2,
            memory: host_memory().expect("Linux tells its memory"),
            folder: ".".into(),
            disk: Disk { free: Bytes(1 << 30), total: Bytes(2 << 30) },
            cache: Ok("/cache".into()),
            libraries,
            gpus: Ok(vec![gpu; opened.len()]),
            opened,
            peers: Vec::new(),
        }
    }

    #[test]
    fn what_is_absent_is_no_fault_and_comes_with_its_remedy() {
        let _limit = testkit::time_limit(10);
        let report = report(vec![library("nccl", None, None)], Vec::new());
        assert!(report.faults().is_empty());
        let text = report.text();
        assert!(text.contains("NCCL") && text.contains("pip install nvidia-nccl-cu13"), "{text}");
        assert!(text.contains("train on the CPU"), "{text}");
        assert_eq!(report.json()["libraries"][0]["path"], Value::Null);
    }

    #[test]
    fn what_is_there_and_broken_is_a_fault() {
        let _limit = testkit::time_limit(10);
        let broken = library("nvrtc", Some("/lib/libnvrtc.so.13"), Some("file too short"));
        let link = Ok(HostLink { up: 5e10, down: 4e10 });
        let opened = vec![
            Ok(Opened { free: Ok(Bytes(100 << 30)), link }),
            Err("ECC error".into()),
            Ok(Opened { free: Ok(Bytes(1)), link: Err("byte 7 changed".into()) }),
        ];
        let mut report = report(vec![broken], opened);
        report.peers = vec![(0, 2, Err("byte 9 changed".into()))];
        let faults = report.faults();
        assert_eq!(faults.len(), 4, "{faults:?}");
        assert!(faults[0].contains("file too short") && faults[1].starts_with("GPU 1: ECC"), "{faults:?}");
        assert!(faults[2].contains("byte 7") && faults[3].starts_with("GPU 0 to GPU 2"), "{faults:?}");
        let text = report.text();
        assert!(text.contains("host to device 50.0 GB/s, back 40.0 GB/s"), "{text}");
        assert!(text.contains("up to 2 GPUs"), "{text}");
        assert_eq!(report.json()["faults"].as_array().map(Vec::len), Some(4));
    }
}
