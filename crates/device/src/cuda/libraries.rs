//! Finds NVIDIA's libraries wherever a machine has them, and loads them before anything asks for them by name.
//!
//! They come with the driver, with the CUDA toolkit, or with a Python environment's wheels. A library that is loaded by its
//! path answers later requests for its name, so nothing has to be set before the program starts.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Environment variable: folders (separated by `:`) that are searched first. A folder may hold the libraries, or be the root
/// of a toolkit or of a Python environment.
pub const PATH_VARIABLE: &str = "GPURUN_CUDA_PATH";

/// Environment variable: NCCL's library, or a folder that holds it. It is used instead of any other that would be
/// found; empty means none.
pub const NCCL_PATH_VARIABLE: &str = "GPURUN_NCCL_PATH";

/// A library of NVIDIA's, and where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaLibrary {
    /// Name without `lib` and `.so`, such as `cublasLt`.
    pub name: &'static str,
    /// Where it lies; `None` when it is nowhere.
    pub path: Option<PathBuf>,
    /// Its version, as far as its name or itself tells.
    pub version: Option<String>,
    /// Why it could not be loaded from `path`.
    pub error: Option<String>,
}

/// In the order in which they depend on each other.
const NEEDED: [&str; 4] = ["cuda", "nvrtc-builtins", "nvrtc", "cublasLt"];

/// Finds and loads the driver, NVRTC and cuBLASLt. They stay loaded; asking again gives the same answer.
#[must_use]
pub fn cuda_libraries() -> Vec<CudaLibrary> {
    let folders = folders();
    NEEDED.iter().map(|name| find(name, &folders)).collect()
}

/// Finds and loads cuDNN, which attention runs faster with and which need not be there.
#[must_use]
pub fn cudnn_library() -> CudaLibrary {
    find("cudnn", &folders())
}

/// Finds and loads NCCL, which several ranks with a GPU each talk through.
#[must_use]
pub fn nccl_library() -> CudaLibrary {
    let Some(asked) = std::env::var_os(NCCL_PATH_VARIABLE).map(PathBuf::from) else {
        return find("nccl", &folders());
    };
    if asked.as_os_str().is_empty() {
        return CudaLibrary { name: "nccl", path: None, version: None, error: None };
    }
    // What was asked for is taken or refused, never replaced.
    let path = if asked.is_dir() { named("nccl", &asked).into_iter().next().unwrap_or(asked) } else { asked };
    let error = open(&path).err();
    let version = if error.is_none() { version("nccl", &path) } else { None };
    CudaLibrary { name: "nccl", path: Some(path), version, error }
}

/// Finds and loads the driver.
pub(super) fn driver_library() -> CudaLibrary {
    find("cuda", &[])
}

impl CudaLibrary {
    /// True when it was found and loads.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.path.is_some() && self.error.is_none()
    }

    /// What is wrong with a library that is not loaded.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        match (&self.path, &self.error) {
            (Some(path), Some(error)) => Some(format!("{} cannot be loaded: {error}", path.display())),
            (None, _) => Some(format!("lib{}.so is nowhere to be found", self.name)),
            (Some(_), None) => None,
        }
    }

    /// The package on PyPI that brings it; `None` for the driver.
    #[must_use]
    pub fn wheel(&self) -> Option<&'static str> {
        match self.name {
            "cuda" => None,
            "nvrtc" | "nvrtc-builtins" => Some("nvidia-cuda-nvrtc"),
            "cublasLt" => Some("nvidia-cublas"),
            "cudnn" => Some("nvidia-cudnn-cu13"),
            "nccl" => Some("nvidia-nccl-cu13"),
            other => unreachable!("gpurun does not look for {other}"),
        }
    }

    /// What brings it to a machine that lacks it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self.wheel() {
            None => "it comes with NVIDIA's driver; without a GPU use the CPU".to_owned(),
            Some(wheel) => format!("`pip install {wheel}` brings it; {PATH_VARIABLE} names a folder to look in"),
        }
    }
}

fn find(name: &'static str, folders: &[PathBuf]) -> CudaLibrary {
    let mut error = None;
    for folder in folders {
        for path in named(name, folder) {
            match open(&path) {
                Ok(()) => {
                    let version = version(name, &path);
                    return CudaLibrary { name, path: Some(path), version, error: None };
                }
                Err(reason) => error = error.or(Some((path, reason))),
            }
        }
    }
    // The system's own search: the loader's cache and default folders.
    for soname in sonames(name) {
        let path = PathBuf::from(&soname);
        if open(&path).is_ok() {
            let path = loaded_path(&soname).unwrap_or(path);
            let version = version(name, &path);
            return CudaLibrary { name, path: Some(path), version, error: None };
        }
    }
    let (path, error) = error.unzip();
    CudaLibrary { name, path, version: None, error }
}

/// Loads a library for the rest of the process, visible to libraries loaded after it.
fn open(path: &Path) -> Result<(), String> {
    // SAFETY: the initialisers of NVIDIA's libraries may run at any time; nothing of them is called here.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())?;
    std::mem::forget(library);
    Ok(())
}

/// Names to ask the system for, best first.
fn sonames(name: &str) -> Vec<String> {
    match name {
        "cuda" => vec!["libcuda.so.1".into()],
        "cudnn" => vec!["libcudnn.so.9".into()],
        "nccl" => vec!["libnccl.so.2".into()],
        "nvrtc-builtins" => Vec::new(), // NVRTC asks for its own by version
        _ => [".13", ".12", ""].iter().map(|major| format!("lib{name}.so{major}")).collect(),
    }
}

/// Files of a folder that are versions of the library, newest name first.
fn named(name: &str, folder: &Path) -> Vec<PathBuf> {
    // The driver belongs to the kernel's module: the system knows which, and toolkits hold stubs of it.
    if name == "cuda" {
        return Vec::new();
    }
    let prefix = format!("lib{name}.so");
    let mut found: Vec<(Vec<u32>, PathBuf)> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let file = entry.file_name().into_string().ok()?;
            let digits = file.strip_prefix(&prefix)?;
            let numbers = digits.split('.').filter(|n| !n.is_empty()).map(str::parse).collect::<Result<_, _>>().ok()?;
            Some((numbers, entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// Path of a loaded library, from the process's own map.
fn loaded_path(soname: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| {
        Path::new(path).file_name().and_then(|f| f.to_str()).is_some_and(|file| file.starts_with(soname))
    })?;
    Some(PathBuf::from(path))
}

/// What the library says of itself, or what its real file is called.
fn version(name: &str, path: &Path) -> Option<String> {
    let said = std::panic::catch_unwind(|| match name {
        "nvrtc" => {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: the library is loaded; it writes to two locals.
            unsafe { cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
            (major > 0).then(|| format!("{major}.{minor}"))
        }
        "cublasLt" => {
            // SAFETY: the library is loaded; the call takes nothing.
            let number = unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() };
            Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
        }
        "cudnn" => {
            // SAFETY: the library is loaded; the call takes nothing.
            let number = unsafe { cudarc::cudnn::sys::cudnnGetVersion() };
            Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
        }
        "cuda" => {
            let mut number = 0;
            // SAFETY: the library is loaded; it writes to a local.
            unsafe { cudarc::driver::sys::cuDriverGetVersion(&raw mut number) };
            (number > 0).then(|| format!("{}.{}", number / 1000, number / 10 % 100))
        }
        "nccl" => nccl_version(path).map(|n| format!("{}.{}.{}", n / 10_000, n / 100 % 100, n % 100)),
        _ => None,
    });
    said.ok().flatten().or_else(|| {
        let real = std::fs::canonicalize(path).ok()?;
        let file = real.file_name()?.to_str()?.to_owned();
        let (_, version) = file.split_once(".so.")?;
        Some(version.to_owned())
    })
}

/// What NCCL says of itself.
fn nccl_version(path: &Path) -> Option<i32> {
    let mut number = 0;
    // SAFETY: the library is loaded already; the type is that of NCCL's header, and the call writes to a local.
    unsafe {
        let library = Library::open(Some(path), RTLD_NOW).ok()?;
        let version = library.get::<unsafe extern "C" fn(*mut i32) -> u32>(b"ncclGetVersion\0").ok()?;
        version(&raw mut number);
    }
    (number > 0).then_some(number)
}

/// Folders to look into, best first, each once.
fn folders() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_else(Vec::new);
    let mut roots: Vec<PathBuf> = variable(PATH_VARIABLE);
    let mut plain: Vec<PathBuf> = variable("LD_LIBRARY_PATH");
    roots.extend(variable("VIRTUAL_ENV"));
    roots.extend(variable("CUDA_HOME"));
    roots.extend(children(Path::new("/opt")).into_iter().map(|c| c.join(".venv")));
    roots.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    roots.push("/usr/local/cuda".into());
    let mut toolkits: Vec<PathBuf> = children(Path::new("/usr/local"))
        .into_iter()
        .filter(|c| c.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cuda-")))
        .collect();
    toolkits.sort();
    roots.extend(toolkits.into_iter().rev());
    roots.extend(["/usr/local".into(), "/usr".into()]);
    plain.extend(roots.iter().flat_map(|root| inside(root)));
    let mut seen = BTreeSet::new();
    plain.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
    // What was asked for comes before what the loader would find.
    let asked = variable(PATH_VARIABLE);
    plain.sort_by_key(|folder| !asked.iter().any(|root| folder.starts_with(root)));
    plain
}

/// Folders of one root that may hold libraries.
fn inside(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned(), root.join("lib64"), root.join("targets/x86_64-linux/lib")];
    found.extend(["lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"].map(|f| root.join(f)));
    let pythons = children(&root.join("lib"))
        .into_iter()
        .filter(|c| c.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")));
    for python in pythons {
        for packages in ["site-packages", "dist-packages"] {
            let mut wheels = children(&python.join(packages).join("nvidia"));
            wheels.sort();
            found.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
        }
    }
    found
}

fn children(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_of_a_library_comes_first() {
        let _limit = testkit::time_limit(10);
        let folder = std::env::temp_dir().join(format!("gpurun-libraries-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for file in
            ["libnvrtc.so.12", "libnvrtc.so.13.0.88", "libnvrtc.so", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0"]
        {
            std::fs::write(folder.join(file), "not a library").expect("a file");
        }
        let names: Vec<_> = named("nvrtc", &folder).iter().map(|p| p.file_name().expect("a name").to_owned()).collect();
        assert_eq!(names, ["libnvrtc.so.13.0.88", "libnvrtc.so.12", "libnvrtc.so"]);
        assert_eq!(named("nvrtc-builtins", &folder).len(), 1);
        assert!(open(&folder.join("libnvrtc.so.12")).is_err(), "a text file is no library");
        std::fs::remove_dir_all(&folder).expect("the folder goes");
    }

    #[test]
    fn folders_of_a_python_environment_are_searched() {
        let _limit = testkit::time_limit(10);
        let root = std::env::temp_dir().join(format!("gpurun-environment-{}", std::process::id()));
        let lib = root.join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).expect("a folder");
        assert!(inside(&root).contains(&lib));
        std::fs::remove_dir_all(&root).expect("the folder goes");
    }
}
