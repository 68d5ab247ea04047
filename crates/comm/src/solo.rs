//! A group of one.

use std::sync::Arc;

use gpurun_device::Backend;
use gpurun_types::{Lane, Rank, View};

use crate::{CommError, Communicator};

/// A group of one rank: what would be sent is copied.
pub struct Solo {
    rank: Rank,
    backend: Arc<dyn Backend>,
}

impl Solo {
    /// The group of `rank` alone.
    #[must_use]
    pub fn new(rank: Rank, backend: Arc<dyn Backend>) -> Self {
        Self { rank, backend }
    }

    fn alone(&self, operation: &'static str) -> CommError {
        CommError::Mismatch { operation, detail: format!("{} is alone in its group", self.rank) }
    }
}

impl Communicator for Solo {
    fn index(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn rank_of(&self, _index: usize) -> Rank {
        self.rank
    }

    fn all_gather(&self, src: View, dst: View) -> Result<(), CommError> {
        Ok(self.backend.copy(Lane::Gather, src, dst)?)
    }

    fn reduce_scatter(&self, src: View, dst: View, accumulate: bool) -> Result<(), CommError> {
        if accumulate {
            self.backend.add_assign(Lane::Reduce, src, dst)?;
        } else {
            self.backend.copy(Lane::Reduce, src, dst)?;
        }
        Ok(())
    }

    fn all_reduce(&self, _buffer: View) -> Result<(), CommError> {
        Ok(())
    }

    fn send(&self, _to: usize, _src: View) -> Result<(), CommError> {
        Err(self.alone("send"))
    }

    fn recv(&self, _from: usize, _dst: View) -> Result<(), CommError> {
        Err(self.alone("recv"))
    }

    fn barrier(&self) -> Result<(), CommError> {
        Ok(())
    }

    fn abort(&self, _reason: &str) {}
}
