//! The CPU backend.

/// Placeholder until the operations land.
pub struct CpuBackend;
