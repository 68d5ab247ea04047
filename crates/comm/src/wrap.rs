//! Communicators around communicators, for tests of those who use them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpurun_types::{DType, Rank, View};

use crate::{CommError, Communicator};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Call {
    /// [`Communicator::all_gather`].
    AllGather,
    /// [`Communicator::reduce_scatter`].
    ReduceScatter,
    /// [`Communicator::all_reduce`].
    AllReduce,
    /// [`Communicator::send`].
    Send,
    /// [`Communicator::recv`].
    Recv,
    /// [`Communicator::barrier`].
    Barrier,
}

/// One call that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What.
    pub call: Call,
    /// Elements of the larger view: the whole buffer of a collective.
    pub elements: usize,
    /// Their type.
    pub dtype: DType,
}

/// Notes every call.
pub struct Recording {
    inner: Arc<dyn Communicator>,
    records: Mutex<Vec<Record>>,
}

impl Recording {
    /// Around `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self { inner, records: Mutex::default() }
    }

    /// The calls so far, in order.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, call: Call, view: View) {
        let record = Record { call, elements: view.len, dtype: view.dtype };
        self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
    }
}

/// What a [`Faulty`] communicator does at its chosen call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails as if this rank's wait had run out.
    Timeout,
    /// Fails as if the job had been aborted.
    Aborted,
    /// Aborts the whole job, then fails.
    AbortAll,
}

/// Works until its `at`-th call (from 0), which fails; so do all later ones.
pub struct Faulty {
    inner: Arc<dyn Communicator>,
    fault: Fault,
    at: u64,
    calls: AtomicU64,
}

impl Faulty {
    /// Around `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Communicator>, fault: Fault, at: u64) -> Self {
        Self { inner, fault, at, calls: AtomicU64::new(0) }
    }

    fn pass(&self, operation: &'static str) -> Result<(), CommError> {
        if self.calls.fetch_add(1, Ordering::SeqCst) < self.at {
            return Ok(());
        }
        let reason = "a fault that was asked for".to_owned();
        Err(match self.fault {
            Fault::Timeout => CommError::Timeout { operation, peer: self.inner.rank_of(0), after: Duration::ZERO },
            Fault::Aborted => CommError::Aborted { operation, reason },
            Fault::AbortAll => {
                self.inner.abort(&reason);
                CommError::Aborted { operation, reason }
            }
        })
    }
}

/// The calls of a wrapper: `$before` first, then the inner communicator.
macro_rules! wrap {
    ($type:ty, |$this:ident, $call:ident, $name:ident, $view:ident| $before:expr) => {
        impl Communicator for $type {
            fn index(&self) -> usize {
                self.inner.index()
            }

            fn size(&self) -> usize {
                self.inner.size()
            }

            fn rank_of(&self, index: usize) -> Rank {
                self.inner.rank_of(index)
            }

            fn all_gather(&self, src: View, dst: View) -> Result<(), CommError> {
                let ($this, $call, $name, $view) = (self, Call::AllGather, "all-gather", Some(dst));
                $before;
                self.inner.all_gather(src, dst)
            }

            fn reduce_scatter(&self, src: View, dst: View, accumulate: bool) -> Result<(), CommError> {
                let ($this, $call, $name, $view) = (self, Call::ReduceScatter, "reduce-scatter", Some(src));
                $before;
                self.inner.reduce_scatter(src, dst, accumulate)
            }

            fn all_reduce(&self, buffer: View) -> Result<(), CommError> {
                let ($this, $call, $name, $view) = (self, Call::AllReduce, "all-reduce", Some(buffer));
                $before;
                self.inner.all_reduce(buffer)
            }

            fn send(&self, to: usize, src: View) -> Result<(), CommError> {
                let ($this, $call, $name, $view) = (self, Call::Send, "send", Some(src));
                $before;
                self.inner.send(to, src)
            }

            fn recv(&self, from: usize, dst: View) -> Result<(), CommError> {
                let ($this, $call, $name, $view) = (self, Call::Recv, "recv", Some(dst));
                $before;
                self.inner.recv(from, dst)
            }

            fn barrier(&self) -> Result<(), CommError> {
                let ($this, $call, $name, $view) = (self, Call::Barrier, "barrier", None::<View>);
                $before;
                self.inner.barrier()
            }

            fn check(&self, operation: &'static str) -> Result<(), CommError> {
                self.inner.check(operation)
            }

            fn abort(&self, reason: &str) {
                self.inner.abort(reason);
            }
        }
    };
}

wrap!(Recording, |this, call, _name, view| if let Some(view) = view {
    this.note(call, view);
});
wrap!(Faulty, |this, _call, name, _view| this.pass(name)?);
