//! Communication between ranks: the [`Communicator`] trait, and communicators over host memory and over NCCL.
//!
//! One communicator serves one group of ranks on one lane, so operations of different lanes never mix. Every wait has
//! a deadline and notices an abort or a dead peer; nothing here can hang without a name.

mod board;
mod fabric;
mod host;
mod nccl;
mod region;
mod solo;
mod staged;
mod sum;
pub mod wrap;

pub use board::Board;
pub use fabric::{Fabric, FabricOptions};
pub use host::HostCommunicator;
pub use nccl::{Nccl, NcclCommunicator, NcclOptions, prepare as prepare_nccl};
pub use region::{abort_shared_memory, create_shared_memory};
pub use solo::Solo;
pub use staged::StagedCommunicator;

use std::time::Duration;

use gpurun_device::DeviceError;
use gpurun_types::{Rank, View};

/// Why a collective or a message did not happen.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// A peer did not arrive in time.
    #[error("{operation}: {peer} did not arrive within {after:?}")]
    Timeout {
        /// The operation that waited.
        operation: &'static str,
        /// The peer that is missing (a global rank).
        peer: Rank,
        /// How long was waited.
        after: Duration,
    },
    /// An operation did not finish in time, and its library does not say for whom it waited.
    #[error("{operation} did not finish within {after:?}")]
    Stuck {
        /// The operation.
        operation: &'static str,
        /// How long was waited.
        after: Duration,
    },
    /// A peer's process or thread is gone.
    #[error("{operation}: {peer} is gone")]
    PeerLost {
        /// The operation that waited.
        operation: &'static str,
        /// The peer (a global rank).
        peer: Rank,
    },
    /// The job is being aborted.
    #[error("{operation}: the job was aborted: {reason}")]
    Aborted {
        /// The operation that waited.
        operation: &'static str,
        /// Who aborted and why.
        reason: String,
    },
    /// Ranks disagree on what is to be done: a bug of the plan that the verifier should have caught.
    #[error("{operation}: {detail}")]
    Mismatch {
        /// The operation.
        operation: &'static str,
        /// What differs.
        detail: String,
    },
    /// The device under the communicator failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// NCCL failed.
    #[error("{operation}: {reason}")]
    Nccl {
        /// The operation.
        operation: &'static str,
        /// What NCCL said.
        reason: String,
    },
    /// The transport failed.
    #[error("{operation}: {source}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl CommError {
    /// True when this rank only noticed the failure of another one: never a first cause.
    #[must_use]
    pub const fn is_secondary(&self) -> bool {
        matches!(self, Self::PeerLost { .. } | Self::Aborted { .. })
    }
}

/// Collectives and messages within one group of ranks, on one lane.
///
/// Views hold `fp32`, `bf16`, `fp16`, `fp64` or `i32`; reductions are sums of `fp32` or `fp64` (bf16 and fp16 are summed in fp32
/// and rounded once), added in rank order, so every rank and every run gets the same bits.
pub trait Communicator: Send + Sync {
    /// This member's index in the group.
    fn index(&self) -> usize;

    /// Members of the group.
    fn size(&self) -> usize;

    /// Global rank of a member.
    fn rank_of(&self, index: usize) -> Rank;

    /// Every member's `src` (equal lengths), in member order, into `dst` (`size * src.len`). `src` may be this member's
    /// place in `dst`.
    fn all_gather(&self, src: View, dst: View) -> Result<(), CommError>;

    /// `dst = sum over members of src[index * dst.len ..][.. dst.len]`; with `accumulate`, `dst += ..` (the sum is formed
    /// first, then added). `dst` may be this member's place in `src` when `accumulate` is false; when it is true, what that
    /// place holds afterwards is not said.
    fn reduce_scatter(&self, src: View, dst: View, accumulate: bool) -> Result<(), CommError>;

    /// `buffer = sum over members`, in place.
    fn all_reduce(&self, buffer: View) -> Result<(), CommError>;

    /// Sends to member `to`. Returns when `src` may be overwritten.
    fn send(&self, to: usize, src: View) -> Result<(), CommError>;

    /// Receives from member `from`; lengths and types must match the send.
    fn recv(&self, from: usize, dst: View) -> Result<(), CommError>;

    /// Returns when every member has called it.
    fn barrier(&self) -> Result<(), CommError>;

    /// Fails when an operation failed after its call had returned: on a device it may run later. Asked once the device has
    /// been waited for.
    fn check(&self, _operation: &'static str) -> Result<(), CommError> {
        Ok(())
    }

    /// Makes every present and later wait of every member fail with [`CommError::Aborted`].
    fn abort(&self, reason: &str);
}
