//! Collectives between GPUs, through NCCL.
//!
//! Every call is enqueued on the stream of the communicator's lane and returns before it ran. No call into NCCL blocks: calls
//! are asked about until they are done, by a rank that meanwhile notices deadlines and aborts. A thread of each
//! communicator watches what has been enqueued, NCCL's own errors, the other ranks and the job; when something is wrong it aborts NCCL,
//! which frees the stream, and [`Communicator::check`] says what it was.
//!
//! For a number of ranks and a length NCCL adds in one order, run after run: algorithms that would add in an order of arrival (NVLink
//! multicast) are switched off by [`prepare`].

mod library;
mod watch;

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use gpurun_device::{Backend, DeviceError, Raw};
use gpurun_types::{DType, Lane, Rank, View};

use crate::{Board, CommError, Communicator, Fabric, HostCommunicator};
use library::{Code, IN_PROGRESS, Library, SHARES_GPU, SUCCESS};
use watch::{Failure, Watched};

/// Sets what NCCL reads from the environment; call it before anything of CUDA is used. NVLink multicast stays off: its sums have no fixed
/// order. With `share_gpu`, ranks may share a GPU.
pub fn prepare(share_gpu: bool) {
    let set = |name: &str, value: &str| {
        // SAFETY: Rust's own readers of the environment share a lock with this; code in C that reads it (CUDA, NCCL) is
        // not loaded yet, by the contract above.
        unsafe { std::env::set_var(name, value) };
    };
    set("NCCL_NVLS_ENABLE", "0");
    if share_gpu {
        set("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    }
}

/// How communicators are made.
#[derive(Clone, Copy, Debug)]
pub struct NcclOptions {
    /// How long a communicator may take to come up, and a collective to finish once the ones before it are done.
    pub timeout: Duration,
    /// Ranks on each GPU. More than one need a library that allows it.
    pub ranks_per_gpu: u32,
}

/// NCCL's library.
pub struct Nccl {
    library: Arc<Library>,
    options: NcclOptions,
}

impl Nccl {
    /// Finds the library; `None` where there is none.
    ///
    /// # Errors
    /// When what is there cannot be used.
    pub fn load(options: NcclOptions) -> Result<Option<Self>, String> {
        let Some(library) = Library::load()? else { return Ok(None) };
        if options.ranks_per_gpu > 1 && library.version < SHARES_GPU {
            return Err(format!(
                "{} is NCCL {}, which does not let ranks share a GPU; 2.30.3 or newer does",
                library.path,
                library.words()
            ));
        }
        Ok(Some(Self { library: Arc::new(library), options }))
    }

    /// Version and place, for people.
    #[must_use]
    pub fn name(&self) -> String {
        format!("NCCL {} ({})", self.library.words(), self.library.path)
    }

    /// A communicator of `members` (global ranks, this one among them) for work on `lane`. All members must ask for it with the
    /// same arguments and in the same order; `board` carries the group's secret, `fabric` barriers, aborts and signs of life.
    ///
    /// # Errors
    /// When it does not come up within the timeout, or NCCL refuses.
    pub fn communicator(
        &self,
        (fabric, board): (&Arc<Fabric>, &dyn Board),
        channel: u32,
        members: &[Rank],
        lane: Lane,
        backend: Arc<dyn Backend>,
    ) -> Result<NcclCommunicator, CommError> {
        const OP: &str = "NCCL's start";
        let host = fabric.communicator(channel, members, backend.clone())?;
        let id = self.unique_id(board, channel, members, host.index())?;
        // The communicator belongs to the device that is current on this thread.
        backend.raw(OP, lane, &[])?;
        let mut config = self.config(members.len());
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let (count, index) = (members.len() as c_int, host.index() as c_int);
        // SAFETY: NCCL writes a handle to a local and reads the configuration during the call only.
        let code = unsafe { (self.library.init)(&raw mut comm, count, id, index, &raw mut config) };
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            let reason = self.library.explain(code, std::ptr::null_mut());
            return Err(CommError::Nccl { operation: OP, reason });
        }
        let timeout = self.options.timeout;
        let watched =
            Watched::start(self.library.clone(), comm, (fabric.clone(), members.to_vec()), backend.clone(), timeout);
        let communicator = NcclCommunicator { host, lane, backend, library: self.library.clone(), watched, timeout };
        communicator.settle(OP)?;
        Ok(communicator)
    }

    fn unique_id(
        &self,
        board: &dyn Board,
        channel: u32,
        members: &[Rank],
        index: usize,
    ) -> Result<ncclUniqueId, CommError> {
        const OP: &str = "NCCL's meeting";
        let failed = |reason: String| CommError::Nccl { operation: OP, reason };
        let key = format!("gpurun/nccl/{channel}/{}-{}", members[0].0, members[members.len() - 1].0);
        let mut id = ncclUniqueId { internal: [0; 128] };
        if index == 0 {
            // SAFETY: NCCL writes to a local.
            let code = unsafe { (self.library.get_unique_id)(&raw mut id) };
            if code != SUCCESS {
                return Err(failed(self.library.explain(code, std::ptr::null_mut())));
            }
            board.put(&key, &id.internal.map(|c| c as u8)).map_err(failed)?;
            return Ok(id);
        }
        let told = board.get(&key).map_err(failed)?;
        let told: [u8; 128] = told.try_into().map_err(|_| failed("the store holds something else".to_owned()))?;
        id.internal = told.map(|byte| byte as c_char);
        Ok(id)
    }

    fn config(&self, members: usize) -> ncclConfig_t {
        /// "Not set", in NCCL's header.
        const UNSET: c_int = c_int::MIN;
        // Blocks of one GPU must all run at once for ranks that share it to get on.
        let most = match self.options.ranks_per_gpu {
            0 | 1 => UNSET,
            _ if members <= 2 => 2,
            _ => 1,
        };
        ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 22_800,
            blocking: 0,
            cgaClusterSize: UNSET,
            minCTAs: if most == UNSET { UNSET } else { 1 },
            maxCTAs: most,
            netName: std::ptr::null(),
            splitShare: UNSET,
            trafficClass: UNSET,
            commName: std::ptr::null(),
            collnetEnable: UNSET,
            CTAPolicy: UNSET,
            shrinkShare: UNSET,
            nvlsCTAs: UNSET,
            nChannelsPerNetPeer: UNSET,
            nvlinkCentricSched: UNSET,
        }
    }
}

/// A group of ranks with a GPU each, on one lane.
pub struct NcclCommunicator {
    /// The same group in host memory: barriers, aborts, who is who.
    host: HostCommunicator,
    lane: Lane,
    backend: Arc<dyn Backend>,
    library: Arc<Library>,
    watched: Watched,
    timeout: Duration,
}

/// How long to wait before NCCL is asked again: it needs microseconds once its connections are up, and up to seconds before.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// NCCL's number for an element type.
const fn datatype(view: View) -> c_int {
    let kind = match view.dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
    };
    kind as c_int
}

impl NcclCommunicator {
    /// Enqueues what `call` does on the lane's stream, once NCCL has taken it.
    fn enqueue(
        &self,
        operation: &'static str,
        views: &[View],
        call: impl FnOnce(&Library, ncclComm_t, &Raw) -> Code,
    ) -> Result<(), CommError> {
        let raw = self.backend.raw(operation, self.lane, views)?;
        let code = self.watched.with(|comm| call(&self.library, comm, &raw)).map_err(|f| f.of(operation))?;
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            let failure = self.watched.failed_with(code);
            return Err(failure.of(operation));
        }
        self.settle(operation)?;
        self.watched.enqueued(operation, self.backend.record(self.lane)?);
        Ok(())
    }

    /// Waits until NCCL has done the last call's work on the host: only then does the stream hold it.
    fn settle(&self, operation: &'static str) -> Result<(), CommError> {
        let began = Instant::now();
        loop {
            match self.watched.state().map_err(|f| f.of(operation))? {
                SUCCESS => return Ok(()),
                IN_PROGRESS if began.elapsed() > self.timeout => {
                    return Err(self.watched.fail(Failure::TimedOut(operation, self.timeout)).of(operation));
                }
                IN_PROGRESS => {
                    let pause = PAUSES[usize::from(began.elapsed() > Duration::from_millis(2))];
                    std::thread::sleep(pause);
                }
                code => return Err(self.watched.failed_with(code).of(operation)),
            }
        }
    }

    fn check_parts(&self, operation: &'static str, whole: View, part: View) -> Result<(), CommError> {
        if whole.dtype == part.dtype && whole.len == part.len * self.size() {
            return Ok(());
        }
        let (n, w, p) = (self.size(), whole, part);
        let detail = format!("{} {} elements do not cut into {n} parts of {} {}", w.len, w.dtype, p.len, p.dtype);
        Err(CommError::Mismatch { operation, detail })
    }

    fn peer(&self, operation: &'static str, index: usize) -> Result<c_int, CommError> {
        if index < self.size() && index != self.index() {
            return Ok(index as c_int);
        }
        let detail = format!("member {} and member {index} of {}", self.index(), self.size());
        Err(CommError::Mismatch { operation, detail })
    }
}

const SUM: c_int = ncclRedOp_t::ncclSum as c_int;

impl Communicator for NcclCommunicator {
    fn index(&self) -> usize {
        self.host.index()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn rank_of(&self, index: usize) -> Rank {
        self.host.rank_of(index)
    }

    fn all_gather(&self, src: View, dst: View) -> Result<(), CommError> {
        const OP: &str = "all-gather";
        self.check_parts(OP, dst, src)?;
        let kind = datatype(src);
        self.enqueue(OP, &[src, dst], |nccl, comm, raw| {
            let (from, to) = (raw.addresses[0] as *const c_void, raw.addresses[1] as *mut c_void);
            // SAFETY: both ranges were checked and live as long as the backend; the stream is the backend's.
            unsafe { (nccl.all_gather)(from, to, src.len, kind, comm, raw.stream) }
        })
    }

    fn reduce_scatter(&self, src: View, dst: View, accumulate: bool) -> Result<(), CommError> {
        const OP: &str = "reduce-scatter";
        self.check_parts(OP, src, dst)?;
        let kind = datatype(src);
        // NCCL cannot add to what is there: the sum is formed in this member's part of `src`.
        let sum = if accumulate { src.slice(self.index() * dst.len, dst.len) } else { dst };
        self.enqueue(OP, &[src, sum], |nccl, comm, raw| {
            let (from, to) = (raw.addresses[0] as *const c_void, raw.addresses[1] as *mut c_void);
            // SAFETY: as above; NCCL allows the result in this member's part of the source.
            unsafe { (nccl.reduce_scatter)(from, to, dst.len, kind, SUM, comm, raw.stream) }
        })?;
        if accumulate {
            self.backend.add_assign(self.lane, sum, dst)?;
        }
        Ok(())
    }

    fn all_reduce(&self, buffer: View) -> Result<(), CommError> {
        const OP: &str = "all-reduce";
        let kind = datatype(buffer);
        self.enqueue(OP, &[buffer], |nccl, comm, raw| {
            let at = raw.addresses[0] as *mut c_void;
            // SAFETY: as above; NCCL reduces in place.
            unsafe { (nccl.all_reduce)(at.cast_const(), at, buffer.len, kind, SUM, comm, raw.stream) }
        })
    }

    fn send(&self, to: usize, src: View) -> Result<(), CommError> {
        const OP: &str = "send";
        let (peer, kind) = (self.peer(OP, to)?, datatype(src));
        self.enqueue(OP, &[src], |nccl, comm, raw| {
            // SAFETY: as above.
            unsafe { (nccl.send)(raw.addresses[0] as *const c_void, src.len, kind, peer, comm, raw.stream) }
        })
    }

    fn recv(&self, from: usize, dst: View) -> Result<(), CommError> {
        const OP: &str = "recv";
        let (peer, kind) = (self.peer(OP, from)?, datatype(dst));
        self.enqueue(OP, &[dst], |nccl, comm, raw| {
            // SAFETY: as above.
            unsafe { (nccl.recv)(raw.addresses[0] as *mut c_void, dst.len, kind, peer, comm, raw.stream) }
        })
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.backend.synchronize(self.lane)?;
        self.check("barrier")?;
        self.host.barrier()
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.watched.failure().map_or(Ok(()), |failure| Err(failure.of(operation)))
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        self.watched.fail(Failure::Aborted(reason.to_owned()));
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        // Work of the lane is done before the communicator goes; an error here was reported by the step that met it.
        let idle: Result<(), DeviceError> = self.backend.synchronize(self.lane);
        self.watched.end(idle.is_ok() && !std::thread::panicking());
    }
}
