//! Agreement between ranks outside steps: barriers and votes over a communicator of their own.

use std::sync::Arc;

use gpurun_comm::Communicator;
use gpurun_device::Backend;
use gpurun_types::{Bytes, DType, Place, View};

use crate::error::EngineError;
use crate::session::control;

/// Votes and barriers of all ranks. A single rank needs no communicator.
pub struct Control {
    link: Option<Link>,
}

struct Link {
    all: Arc<dyn Communicator>,
    backend: Arc<dyn Backend>,
    /// fp64 `[1]`: the ballot.
    view: View,
}

impl Control {
    /// For a job of one rank.
    #[must_use]
    pub const fn solo() -> Self {
        Self { link: None }
    }

    /// Over a communicator of all ranks, whose views `backend` resolves.
    pub fn new(link: Arc<dyn Communicator>, backend: Arc<dyn Backend>) -> Result<Self, EngineError> {
        let set_up = |source| EngineError::SetUp { what: "control memory", source };
        let arena = backend.allocate(Place::Host, Bytes(4096)).map_err(set_up)?;
        let view = View { arena, offset: 0, len: 1, dtype: DType::F64 };
        Ok(Self { link: Some(Link { all: link, backend, view }) })
    }

    /// True on every rank when `flag` is true on any.
    pub fn any(&self, flag: bool) -> Result<bool, EngineError> {
        Ok(self.sum(f64::from(u8::from(flag)))? != 0.0)
    }

    /// The value of the one rank that has one.
    pub fn told(&self, value: Option<f64>) -> Result<f64, EngineError> {
        self.sum(value.unwrap_or(0.0))
    }

    /// The sum of all ranks' values, on every rank.
    fn sum(&self, value: f64) -> Result<f64, EngineError> {
        let Some(Link { all, backend, view }) = &self.link else { return Ok(value) };
        let set_up = |source| EngineError::SetUp { what: "a vote", source };
        let mut bytes = value.to_le_bytes();
        backend.upload(&bytes, *view).map_err(set_up)?;
        all.all_reduce(*view).map_err(control("a vote of all ranks"))?;
        backend.download(*view, &mut bytes).map_err(set_up)?;
        Ok(f64::from_le_bytes(bytes))
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), EngineError> {
        match &self.link {
            Some(link) => link.all.barrier().map_err(control("a barrier of all ranks")),
            None => Ok(()),
        }
    }

    /// Makes every wait of every rank fail.
    pub fn abort(&self, reason: &str) {
        if let Some(link) = &self.link {
            link.all.abort(reason);
        }
    }
}
