//! Owns NCCL's handle, and watches over what was enqueued with it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::ncclComm_t;
use gpurun_device::{Backend, Mark};
use gpurun_types::Rank;

use super::library::{Code, IN_PROGRESS, Library, REMOTE_ERROR, SUCCESS};
use crate::{CommError, Fabric};

/// Between two looks of the watching thread.
const LOOK: Duration = Duration::from_millis(20);

/// How long work may go on after a peer has left: it may have left because its part was done.
const GRACE: Duration = Duration::from_secs(1);

/// How long the end of a communicator may take when all is well.
const FAREWELL: Duration = Duration::from_secs(10);

/// Why a communicator is of no more use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The job is given up.
    Aborted(String),
    /// A peer is gone.
    Lost(Rank),
    /// An operation took too long.
    TimedOut(&'static str, Duration),
    /// NCCL failed.
    Nccl(String),
}

impl Failure {
    /// As the failure of an operation.
    pub fn of(self, operation: &'static str) -> CommError {
        match self {
            Self::Aborted(reason) => CommError::Aborted { operation, reason },
            Self::Lost(peer) => CommError::PeerLost { operation, peer },
            Self::TimedOut(which, after) => CommError::Stuck { operation: which, after },
            Self::Nccl(reason) => CommError::Nccl { operation, reason },
        }
    }
}

/// NCCL's handle; null once it is aborted or destroyed.
struct Handle(ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time; the lock around it sees to that.
unsafe impl Send for Handle {}

struct Shared {
    library: Arc<Library>,
    backend: Arc<dyn Backend>,
    fabric: Arc<Fabric>,
    members: Vec<Rank>,
    timeout: Duration,
    handle: Mutex<Handle>,
    failure: Mutex<Option<Failure>>,
    /// What is enqueued and, when last looked at, had not passed; oldest first.
    pending: Mutex<VecDeque<(&'static str, Mark)>>,
    ended: Mutex<bool>,
    changed: Condvar,
}

/// A communicator's handle with a thread that watches it.
pub(super) struct Watched {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched {
    pub fn start(
        library: Arc<Library>,
        comm: ncclComm_t,
        (fabric, members): (Arc<Fabric>, Vec<Rank>),
        backend: Arc<dyn Backend>,
        timeout: Duration,
    ) -> Self {
        let shared = Arc::new(Shared {
            library,
            backend,
            fabric,
            members,
            timeout,
            handle: Mutex::new(Handle(comm)),
            failure: Mutex::default(),
            pending: Mutex::default(),
            ended: Mutex::new(false),
            changed: Condvar::new(),
        });
        let watching = shared.clone();
        let thread = std::thread::Builder::new().name("nccl-watch".to_owned()).spawn(move || watching.watch());
        Self { shared, thread: Some(thread.expect("a thread that watches NCCL can be started")) }
    }

    /// Calls NCCL with the handle.
    pub fn with<T>(&self, call: impl FnOnce(ncclComm_t) -> T) -> Result<T, Failure> {
        let handle = lock(&self.shared.handle);
        if handle.0.is_null() {
            drop(handle);
            return Err(self.failure().unwrap_or(Failure::Aborted("the communicator has ended".to_owned())));
        }
        Ok(call(handle.0))
    }

    /// What NCCL says of the work so far.
    pub fn state(&self) -> Result<Code, Failure> {
        self.with(|comm| self.shared.state(comm))
    }

    pub fn failure(&self) -> Option<Failure> {
        lock(&self.shared.failure).clone()
    }

    /// Gives the communicator up: the first reason stays, and is returned.
    pub fn fail(&self, failure: Failure) -> Failure {
        self.shared.fail(failure)
    }

    /// Gives the communicator up over what NCCL answered.
    pub fn failed_with(&self, code: Code) -> Failure {
        let reason = self.with(|comm| self.shared.library.explain(code, comm));
        let reason = reason.unwrap_or_else(|_| self.shared.library.explain(code, std::ptr::null_mut()));
        self.shared.fail(self.shared.cause(code, reason))
    }

    pub fn enqueued(&self, operation: &'static str, mark: Mark) {
        lock(&self.shared.pending).push_back((operation, mark));
    }

    /// Ends the communicator: together with the other members where all is well, else by itself.
    pub fn end(&mut self, well: bool) {
        *lock(&self.shared.ended) = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Its panic has been reported by the panic hook, and what it watched ends here.
            let _ = thread.join();
        }
        let mut handle = lock(&self.shared.handle);
        let comm = std::mem::replace(&mut handle.0, std::ptr::null_mut());
        if !comm.is_null() {
            let friendly = well && self.shared.say_farewell(comm);
            let last = if friendly { self.shared.library.destroy } else { self.shared.library.abort };
            // SAFETY: the handle is alive and used no more. What NCCL answers at the end changes nothing.
            let _ = unsafe { last(comm) };
        }
    }
}

impl Shared {
    fn state(&self, comm: ncclComm_t) -> Code {
        let mut state = SUCCESS;
        // SAFETY: the handle is alive: the caller holds its lock; NCCL writes to a local.
        let code = unsafe { (self.library.async_error)(comm, &raw mut state) };
        if code == SUCCESS { state } else { code }
    }

    /// What stands behind an error of NCCL's: where another rank is gone, that is the cause.
    fn cause(&self, code: Code, reason: String) -> Failure {
        if let Some(reason) = self.fabric.abort_reason() {
            return Failure::Aborted(reason);
        }
        match self.lost() {
            Some(peer) => Failure::Lost(peer),
            None if code == REMOTE_ERROR => Failure::Aborted(reason),
            None => Failure::Nccl(reason),
        }
    }

    fn lost(&self) -> Option<Rank> {
        self.members.iter().copied().find(|member| !self.fabric.lives(*member))
    }

    fn fail(&self, failure: Failure) -> Failure {
        let first = lock(&self.failure).get_or_insert(failure).clone();
        if !matches!(first, Failure::Aborted(_)) {
            self.fabric.abort(&first.clone().of("NCCL").to_string());
        }
        let comm = std::mem::replace(&mut lock(&self.handle).0, std::ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the handle is alive, and from here on nobody else's. Its kernels leave the stream.
            let _ = unsafe { (self.library.abort)(comm) };
        }
        first
    }

    fn watch(&self) {
        // When the oldest work became the oldest, and since when a peer is missing.
        let mut since = Instant::now();
        let mut missing: Option<Instant> = None;
        loop {
            let ended = lock(&self.ended);
            let (ended, _) =
                self.changed.wait_timeout_while(ended, LOOK, |ended| !*ended).unwrap_or_else(PoisonError::into_inner);
            if *ended {
                return;
            }
            drop(ended);
            if let Some(failure) = self.look(&mut since, &mut missing) {
                self.fail(failure);
                return;
            }
        }
    }

    fn look(&self, since: &mut Instant, missing: &mut Option<Instant>) -> Option<Failure> {
        if let Some(reason) = self.fabric.abort_reason() {
            return Some(Failure::Aborted(reason));
        }
        let (code, reason) = {
            let handle = lock(&self.handle);
            if handle.0.is_null() {
                // Somebody else gave it up.
                return None;
            }
            let code = self.state(handle.0);
            (
                code,
                if matches!(code, SUCCESS | IN_PROGRESS) {
                    String::new()
                } else {
                    self.library.explain(code, handle.0)
                },
            )
        };
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            return Some(self.cause(code, reason));
        }
        let oldest = match self.oldest(since) {
            Ok(oldest) => oldest,
            // The device has failed: the thread that drives it says so itself. Peers must not wait meanwhile.
            Err(error) => return Some(Failure::Nccl(error.to_string())),
        };
        let waiting = oldest.is_some() || code == IN_PROGRESS;
        match self.lost().filter(|_| waiting) {
            None => *missing = None,
            Some(peer) if missing.get_or_insert_with(Instant::now).elapsed() > GRACE => {
                return Some(Failure::Lost(peer));
            }
            Some(_) => {}
        }
        oldest.filter(|_| since.elapsed() > self.timeout).map(|operation| Failure::TimedOut(operation, self.timeout))
    }

    /// The oldest operation that is not done; `since` is set anew when it is another one than before.
    fn oldest(&self, since: &mut Instant) -> Result<Option<&'static str>, gpurun_device::DeviceError> {
        loop {
            let front = lock(&self.pending).front().copied();
            let Some((operation, mark)) = front else {
                *since = Instant::now();
                return Ok(None);
            };
            if !self.backend.passed(mark)? {
                return Ok(Some(operation));
            }
            lock(&self.pending).pop_front();
            *since = Instant::now();
        }
    }

    /// Ends the communicator together with the others; false when they do not come.
    fn say_farewell(&self, comm: ncclComm_t) -> bool {
        // SAFETY: the handle is alive, and this thread's alone.
        let mut state = unsafe { (self.library.finalize)(comm) };
        let began = Instant::now();
        while state == IN_PROGRESS {
            if began.elapsed() > FAREWELL || self.fabric.abort_reason().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
            state = self.state(comm);
        }
        state == SUCCESS
    }
}
