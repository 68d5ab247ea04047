//! Backends: the operations a model needs, over arenas of plain memory.
//!
//! A [`Backend`] owns arenas and runs operations on [views](gpurun_types::View) of them. It knows no unit, no rank and no plan. The caller
//! (the engine's interpreter) promises that two operations that run at the same time never touch the same bytes unless
//! both only read: the plan's verifier proves that before step 0.
//!
//! All matrices are row-major. Every operation checks the lengths and element types of its views and answers
//! [`DeviceError::Shape`] when they do not fit together.

mod adam;
mod backend;
mod cpu;
mod cuda;
mod nvml;
mod ops;
mod peak;
mod probe;
#[cfg(feature = "suite")]
pub mod suite;

pub use backend::{Backend, DeviceError, Mark, Raw, ScratchSizes};
pub use cpu::{ArenaUse, CpuBackend, CpuSizes};
pub use cuda::{
    CUDA_PATH_VARIABLE, CudaBackend, CudaLibrary, CudaSizes, CudnnAttention, Gpu, HostLink, KernelSource, KernelUnit,
    NCCL_PATH_VARIABLE, PeerLink, check_host_link, check_peer_link, compile_kernels, cuda_device_ids, cuda_gpus,
    cuda_libraries, cudnn_library, nccl_library,
};
pub use nvml::{GpuMonitor, GpuProcess};
pub use ops::*;
pub use peak::{Peak, peak};
pub use probe::{DeviceRates, HostRates, device_rates, host_rates};
