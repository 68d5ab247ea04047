//! The CUDA backend: cuBLASLt for matrix products, kernels of our own for everything else.
//!
//! Each lane is a stream, each mark an event. Nothing of CUDA is needed to build or to start: libraries are found when a
//! backend is made, kernels are compiled for the device at hand when first used and kept on disk. Every operation gives the
//! same bits every run: no sum depends on the order in which blocks happen to run.
//!
//! Operations on [`Lane::Host`] run on the calling thread and the host backend's threads; waiting on that lane blocks the
//! caller.

mod attention;
mod backend;
mod cache;
mod check;
mod compile;
mod cudnn;
mod driver;
mod flash;
mod inventory;
mod libraries;
mod matmul;
mod memory;
mod norm;
mod optimizer;
mod pointwise;
mod rows;

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError, RwLock};

use cudarc::driver::sys;
use gpurun_types::{Bytes, DType, Lane};

use crate::{AttentionShape, CpuBackend, DeviceError, ScratchSizes};
pub use compile::{Source as KernelSource, Unit as KernelUnit, compile as compile_kernels};
pub use cudnn::CudnnAttention;
use driver::{Arguments, Driver, Launch, check as check_call};
pub use inventory::{Gpu, HostLink, PeerLink, check_host_link, check_peer_link, cuda_device_ids, cuda_gpus};
pub use libraries::{
    CudaLibrary, NCCL_PATH_VARIABLE, PATH_VARIABLE as CUDA_PATH_VARIABLE, cuda_libraries, cudnn_library, nccl_library,
};
use memory::Arena;

type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Scratch of matrix products, in bytes (NVIDIA's advice for Hopper is 32 MiB).
const WORKSPACE: u64 = 64 << 20;

/// Operations on an NVIDIA GPU.
pub struct CudaBackend {
    // Before the driver: it needs the context to the end.
    library: matmul::Library,
    driver: Driver,
    arenas: RwLock<Vec<Arena>>,
    /// Address and bytes, for each lane.
    workspaces: Mutex<Vec<(u64, u64)>>,
    modules: Mutex<HashMap<KernelUnit, usize>>,
    functions: Mutex<HashMap<(KernelUnit, &'static str), usize>>,
    faults: Faults,
    cudnn: cudnn::Cudnn,
    // Last: it owns the pages that are registered with the driver.
    host: CpuBackend,
}

impl CudaBackend {
    /// A backend on GPU `index`, whose host operations run on `threads` threads.
    ///
    /// # Errors
    /// When the driver, NVRTC or cuBLASLt is not to be found, or there is no such GPU.
    pub fn new(index: u32, threads: usize) -> Result<Self> {
        // cudarc panics where a library lacks a function; that is a machine we cannot use, not a bug of ours.
        std::panic::catch_unwind(|| Self::open(index, threads)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default();
            Err(DeviceError::Missing(format!("NVIDIA's libraries cannot be used: {text}")))
        })
    }

    fn open(index: u32, threads: usize) -> Result<Self> {
        for library in cuda_libraries() {
            if library.name != "nvrtc-builtins" && !library.is_loaded() {
                return Err(missing(&library));
            }
        }
        let driver = Driver::open(index)?;
        let library = matmul::Library::new()?;
        let faults = Faults::new()?;
        Ok(Self {
            library,
            driver,
            arenas: RwLock::default(),
            workspaces: Mutex::new(vec![(0, 0); Lane::ALL.len()]),
            modules: Mutex::default(),
            functions: Mutex::default(),
            faults,
            cudnn: cudnn::Cudnn::default(),
            host: CpuBackend::new(threads)?,
        })
    }

    /// A kernel, compiled and loaded at its first use.
    fn function(&self, unit: KernelUnit, name: &'static str) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&(unit, name)) {
            return Ok(*function as sys::CUfunction);
        }
        let module = self.module(unit)?;
        let symbol = CString::new(name).expect("kernels' names hold no zero byte");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends in a zero byte.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut function, module, symbol.as_ptr()) };
        check_call(&format!("cuModuleGetFunction({name})"), code)?;
        functions.insert((unit, name), function as usize);
        Ok(function)
    }

    fn module(&self, unit: KernelUnit) -> Result<sys::CUmodule> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&unit) {
            return Ok(*module as sys::CUmodule);
        }
        let code = compile_kernels(unit, &self.driver.architecture())?;
        self.driver.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is a whole binary, as the compiler made it (its hash was checked if it came from the disk).
        check_call("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) })?;
        modules.insert(unit, module as usize);
        Ok(module)
    }

    /// Enqueues the kernel `name` of `source` for views of `dtype`.
    ///
    /// # Safety
    /// As for [`Driver::launch`]: the arguments are those that the kernel takes, and what it touches with them lies within
    /// views that were checked.
    unsafe fn launch(
        &self,
        lane: Lane,
        (source, dtype, name): (KernelSource, DType, &'static str),
        launch: Launch,
        args: Arguments,
    ) -> Result {
        let unit = KernelUnit { source, element: element(dtype), head_dim: 0 };
        let function = self.function(unit, name)?;
        // SAFETY: the caller vouches for the arguments.
        unsafe { self.driver.launch(lane, function, launch, args) }
    }
}

fn missing(library: &CudaLibrary) -> DeviceError {
    DeviceError::Missing(format!("{} ({})", library.fault().unwrap_or_default(), library.remedy()))
}

/// Name of a storage type in kernels.
fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
        _ => "float",
    }
}

/// Host memory in which kernels report inputs that are out of range: the first of them since the last look.
struct Faults {
    words: *mut i32,
    address: u64,
}

// SAFETY: the words are read and reset only through volatile accesses after the work that may write them is done.
unsafe impl Send for Faults {}
// SAFETY: as above.
unsafe impl Sync for Faults {}

impl Faults {
    fn new() -> Result<Self> {
        let mut words = std::ptr::null_mut();
        let mut address = 0;
        // SAFETY: the context is current; the driver writes to locals and gives 16 bytes, which are then set to zero.
        unsafe {
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            check_call("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut words, 16, flags))?;
            std::ptr::write_bytes(words.cast::<u8>(), 0, 16);
            check_call("cuMemHostGetDevicePointer", sys::cuMemHostGetDevicePointer_v2(&raw mut address, words, 0))?;
        }
        Ok(Self { words: words.cast(), address })
    }

    /// The fault that was reported since the last call, if any.
    fn take(&self) -> Result {
        // SAFETY: the memory holds four words and lives as long as the backend.
        let [kind, row, value] = unsafe { [0, 1, 2].map(|i| self.words.add(i).read_volatile()) };
        if kind == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.words.write_volatile(0) };
        let (operation, reason) = match kind {
            1 => ("embedding", format!("token {value} at {row} is not in the vocabulary")),
            _ => ("cross_entropy", format!("target {value} of row {row} is not in the vocabulary")),
        };
        Err(DeviceError::Failed { operation: operation.to_owned(), reason })
    }
}

/// Scratch sizes of the CUDA backend, where there is no backend at hand.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaSizes;

impl ScratchSizes for CudaSizes {
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes {
        DType::F32.bytes(norm::blocks(rows) * 2 * width)
    }

    fn attention_scratch(&self, shape: AttentionShape, _dtype: DType) -> Bytes {
        // One number for each row of each query head.
        DType::F32.bytes(shape.batch * shape.heads * shape.seq)
    }

    fn logits_budget(&self) -> Bytes {
        Bytes(512 << 20)
    }
}

impl ScratchSizes for CudaBackend {
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes {
        CudaSizes.norm_backward_scratch(rows, width)
    }

    fn attention_scratch(&self, shape: AttentionShape, dtype: DType) -> Bytes {
        CudaSizes.attention_scratch(shape, dtype)
    }

    fn logits_budget(&self) -> Bytes {
        CudaSizes.logits_budget()
    }
}
