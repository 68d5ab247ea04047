//! The host communicator for memory that the host cannot address: everything goes through pinned host memory.

use std::sync::{Arc, Mutex, PoisonError};

use gpurun_device::Backend;
use gpurun_types::{Bytes, DType, Lane, Place, Rank, View};

use crate::{CommError, Communicator, HostCommunicator};

/// Host memory of one communicator: a chunk of every member, and one more for sums.
const STAGE: usize = 8 << 20;

/// A group of ranks whose memory is copied to the host, sent there, and copied back. The calling thread waits for every copy,
/// so nothing overlaps; sums have the order and the bits of [`HostCommunicator`].
pub struct StagedCommunicator {
    host: HostCommunicator,
    lane: Lane,
    backend: Arc<dyn Backend>,
    stage: View,
    /// Held for the whole of a call.
    busy: Mutex<()>,
}

impl StagedCommunicator {
    /// Around `host`, for work on `lane` of the backend that `host` was made with.
    ///
    /// # Errors
    /// When there is no host memory to copy through.
    pub fn new(host: HostCommunicator, lane: Lane, backend: Arc<dyn Backend>) -> Result<Self, CommError> {
        let arena = backend.allocate(Place::Host, Bytes(STAGE as u64))?;
        let stage = View { arena, offset: 0, len: STAGE / DType::F32.size(), dtype: DType::F32 };
        Ok(Self { host, lane, backend, stage, busy: Mutex::new(()) })
    }

    /// `parts` equal pieces of host memory of `len` elements each.
    fn pieces(&self, parts: usize, len: usize, dtype: DType) -> View {
        let whole = View { len: parts * len, dtype, ..self.stage };
        assert!(whole.bytes() <= STAGE as u64, "a chunk fits its memory");
        whole
    }

    /// Elements of one member that are sent at a time when `parts` pieces of them lie in host memory.
    fn step(&self, parts: usize, dtype: DType) -> usize {
        // Pieces start at multiples of 64 bytes.
        (STAGE / parts / dtype.size()) & !63
    }

    fn copy(&self, src: View, dst: View) -> Result<(), CommError> {
        Ok(self.backend.copy(self.lane, src, dst)?)
    }

    fn settle(&self) -> Result<(), CommError> {
        Ok(self.backend.synchronize(self.lane)?)
    }

    /// Calls `body` with the start and length of each chunk of `len` elements.
    fn chunks(
        &self,
        len: usize,
        step: usize,
        mut body: impl FnMut(usize, usize) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        // Every member takes part in a call of no elements, too.
        for at in (0..len.max(1)).step_by(step) {
            body(at, step.min(len - at))?;
        }
        Ok(())
    }

    fn parts_of(&self, operation: &'static str, whole: View, part: View) -> Result<usize, CommError> {
        let n = self.host.size();
        if whole.dtype == part.dtype && whole.len == part.len * n {
            return Ok(n);
        }
        let detail =
            format!("{} {} elements do not cut into {n} parts of {} {}", whole.len, whole.dtype, part.len, part.dtype);
        Err(CommError::Mismatch { operation, detail })
    }
}

impl Communicator for StagedCommunicator {
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
        let n = self.parts_of("all-gather", dst, src)?;
        let me = self.host.index();
        self.chunks(src.len, self.step(n, src.dtype), |at, len| {
            let stage = self.pieces(n, len, src.dtype);
            let own = stage.slice(me * len, len);
            self.copy(src.slice(at, len), own)?;
            self.settle()?;
            self.host.all_gather(own, stage)?;
            for member in (0..n).filter(|member| *member != me) {
                self.copy(stage.slice(member * len, len), dst.slice(member * src.len + at, len))?;
            }
            let mine = dst.slice(me * src.len + at, len);
            if mine != src.slice(at, len) {
                self.copy(own, mine)?;
            }
            self.settle()
        })
    }

    fn reduce_scatter(&self, src: View, dst: View, accumulate: bool) -> Result<(), CommError> {
        let n = self.parts_of("reduce-scatter", src, dst)?;
        self.chunks(dst.len, self.step(n + 1, src.dtype), |at, len| {
            let room = self.pieces(n + 1, len, src.dtype);
            let (terms, sum) = (room.slice(0, n * len), room.slice(n * len, len));
            for member in 0..n {
                self.copy(src.slice(member * dst.len + at, len), terms.slice(member * len, len))?;
            }
            if accumulate {
                self.copy(dst.slice(at, len), sum)?;
            }
            self.settle()?;
            self.host.reduce_scatter(terms, sum, accumulate)?;
            self.copy(sum, dst.slice(at, len))?;
            self.settle()
        })
    }

    fn all_reduce(&self, buffer: View) -> Result<(), CommError> {
        self.chunks(buffer.len, self.step(1, buffer.dtype), |at, len| {
            let stage = self.pieces(1, len, buffer.dtype);
            self.copy(buffer.slice(at, len), stage)?;
            self.settle()?;
            self.host.all_reduce(stage)?;
            self.copy(stage, buffer.slice(at, len))?;
            self.settle()
        })
    }

    fn send(&self, to: usize, src: View) -> Result<(), CommError> {
        self.chunks(src.len, self.step(1, src.dtype), |at, len| {
            let stage = self.pieces(1, len, src.dtype);
            self.copy(src.slice(at, len), stage)?;
            self.settle()?;
            self.host.send(to, stage)
        })
    }

    fn recv(&self, from: usize, dst: View) -> Result<(), CommError> {
        self.chunks(dst.len, self.step(1, dst.dtype), |at, len| {
            let stage = self.pieces(1, len, dst.dtype);
            self.host.recv(from, stage)?;
            self.copy(stage, dst.slice(at, len))?;
            self.settle()
        })
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.settle()?;
        self.host.barrier()
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
    }
}
