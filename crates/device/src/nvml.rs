//! What NVIDIA's management library (NVML) tells of a GPU's memory: how much is in use, and by whom. It comes with the driver;
//! where it is missing, nothing is told.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fs;

use gpurun_types::Bytes;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

const NAME: &str = "libnvidia-ml.so.1";

/// `nvmlReturn_t`.
type Code = c_int;
const SUCCESS: Code = 0;
const TOO_SMALL: Code = 7;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`, as the functions of version 2 and 3 fill it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// What NVML says in place of bytes that it does not know.
const UNKNOWN: u64 = u64::MAX;

type Init = unsafe extern "C" fn() -> Code;
type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> Code;
type MemoryOf = unsafe extern "C" fn(*mut c_void, *mut Memory) -> Code;
type ProcessesOf = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut Process) -> Code;

/// A process that holds memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its number, in the driver's own process namespace: a container may know it by another one.
    pub pid: u32,
    /// How much it holds; `None` where the driver does not tell.
    pub bytes: Option<Bytes>,
    /// Its name, where this process may see it.
    pub name: Option<String>,
}

/// Watches the memory of one GPU without taking any of it.
pub struct GpuMonitor {
    device: *mut c_void,
    memory: MemoryOf,
    compute: ProcessesOf,
    graphics: ProcessesOf,
    /// Keeps the functions where they are.
    _library: Library,
}

// SAFETY: NVML may be called from any thread; the handle is never freed.
unsafe impl Send for GpuMonitor {}
// SAFETY: as above.
unsafe impl Sync for GpuMonitor {}

impl GpuMonitor {
    /// Of the GPU with this identity, as [`crate::cuda_device_ids`] gives it; `None` where NVML is missing or does not know it.
    #[must_use]
    pub fn open(id: [u8; 16]) -> Option<Self> {
        // SAFETY: NVML's initialisers have no preconditions.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the types are those that NVML's header gives these symbols.
        let (init, by_uuid, memory, compute, graphics) = unsafe {
            (
                *library.get::<Init>(b"nvmlInit_v2\0").ok()?,
                *library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?,
                *library.get::<MemoryOf>(b"nvmlDeviceGetMemoryInfo\0").ok()?,
                *library.get::<ProcessesOf>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?,
                *library.get::<ProcessesOf>(b"nvmlDeviceGetGraphicsRunningProcesses_v3\0").ok()?,
            )
        };
        let name = CString::new(spelled(id)).expect("no digit is zero");
        let mut device = std::ptr::null_mut();
        // SAFETY: the library counts its users; the string ends in a zero byte, and the handle is written to a local.
        let found = unsafe { init() == SUCCESS && by_uuid(name.as_ptr(), &raw mut device) == SUCCESS };
        found.then_some(Self { device, memory, compute, graphics, _library: library })
    }

    /// Memory of the GPU that is in use, by whomever.
    #[must_use]
    pub fn used(&self) -> Option<Bytes> {
        let mut memory = Memory::default();
        // SAFETY: the handle is NVML's; it writes to a local of its own layout.
        let code = unsafe { (self.memory)(self.device, &raw mut memory) };
        (code == SUCCESS).then_some(Bytes(memory.used))
    }

    /// Processes that hold memory of the GPU, those that hold most first.
    #[must_use]
    pub fn processes(&self) -> Vec<GpuProcess> {
        let mut all: Vec<GpuProcess> =
            [self.compute, self.graphics].into_iter().flat_map(|list| self.list(list)).map(named).collect();
        all.sort_by_key(|process| (process.pid, std::cmp::Reverse(process.bytes)));
        // A process that computes and draws stands in both lists.
        all.dedup_by_key(|process| process.pid);
        all.sort_by_key(|process| std::cmp::Reverse(process.bytes));
        all
    }

    fn list(&self, list: ProcessesOf) -> Vec<Process> {
        let mut found = vec![Process::default(); 64];
        loop {
            let mut count = found.len() as c_uint;
            // SAFETY: NVML writes at most `count` entries of the layout that its header gives them, and their number.
            match unsafe { list(self.device, &raw mut count, found.as_mut_ptr()) } {
                SUCCESS => {
                    found.truncate(count as usize);
                    return found;
                }
                TOO_SMALL if found.len() < 1 << 16 => found.resize(found.len() * 2, Process::default()),
                _ => return Vec::new(),
            }
        }
    }
}

fn named(process: Process) -> GpuProcess {
    let name = fs::read_to_string(format!("/proc/{}/comm", process.pid)).ok();
    GpuProcess {
        pid: process.pid,
        bytes: (process.bytes != UNKNOWN).then_some(Bytes(process.bytes)),
        name: name.map(|name| name.trim().to_owned()),
    }
}

/// `GPU-01234567-89ab-cdef-0123-456789abcdef`.
fn spelled(id: [u8; 16]) -> String {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_spelled_as_the_driver_does() {
        let _limit = testkit::time_limit(10);
        let id: [u8; 16] = std::array::from_fn(|i| (i as u8) * 17);
        assert_eq!(spelled(id), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        // Whatever this machine has, nobody made a GPU of this identity.
        assert!(GpuMonitor::open(id).is_none());
    }

    #[test]
    fn a_process_has_the_name_that_this_process_sees_and_bytes_that_are_told() {
        let _limit = testkit::time_limit(10);
        let told = named(Process { pid: std::process::id(), bytes: 5, ..Process::default() });
        assert!(told.name.is_some_and(|name| !name.is_empty()));
        assert_eq!(told.bytes, Some(Bytes(5)));
        assert_eq!(named(Process { pid: u32::MAX, bytes: UNKNOWN, ..Process::default() }).bytes, None);
    }
}
