//! gpurun
pub mod worker;
