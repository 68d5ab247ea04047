//! The CPU backend: fp32 arithmetic over fp32, bf16 or fp16 storage, on a thread pool of its own.
//!
//! Results do not depend on the number of threads: work is cut into pieces whose bounds depend on sizes only, and partial
//! sums are combined in the order of the pieces.

mod arena;
mod attention;
mod element;
mod embedding;
mod kernels;
mod loss;
mod matmul;
mod norm;
mod optimizer;
mod pointwise;

use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

use crate::{
    AdamW, Attention, AttentionBackward, AttentionShape, Backend, CrossEntropy, DeviceError, Embedding, Mark, Matmul,
    NormBackward, NormForward, Rope, ScratchSizes, StepScalars,
};
use arena::Arena;

pub(crate) type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Operations on the processor.
pub struct CpuBackend {
    threads: usize,
    pool: Option<rayon::ThreadPool>,
    arenas: RwLock<Vec<Arena>>,
    spare: Mutex<Vec<Vec<f32>>>,
}

/// Fewest elements that are worth a piece of their own.
const GRAIN: usize = 16 * 1024;

impl CpuBackend {
    /// A backend that computes on `threads` threads (at least one).
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = threads.max(1);
        let pool = if threads == 1 {
            None
        } else {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("cpu-{i}")).build();
            Some(pool.map_err(|e| DeviceError::Failed { operation: "starting threads".into(), reason: e.to_string() })?)
        };
        Ok(Self { threads, pool, arenas: RwLock::default(), spare: Mutex::default() })
    }

    /// Runs `body` on pieces of `0..items` of about `grain` items, in parallel. The pieces depend on the sizes only.
    fn pieces(&self, items: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        let count = items.div_ceil(grain);
        let piece = |i: usize| i * grain..((i + 1) * grain).min(items);
        match &self.pool {
            Some(pool) if count > 1 => pool.install(|| {
                use rayon::prelude::*;
                (0..count).into_par_iter().with_max_len(1).for_each(|i| body(piece(i)));
            }),
            _ => (0..count).for_each(|i| body(piece(i))),
        }
    }

    /// Runs `body` on pieces of `rows` rows of `width` elements each.
    fn rows(&self, rows: usize, width: usize, body: impl Fn(Range<usize>) + Sync) {
        self.pieces(rows, (GRAIN / width.max(1)).max(1), body);
    }

    fn parallelism(&self) -> gemm::Parallelism {
        if self.threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(self.threads) }
    }

    /// A buffer of at least `len` elements, contents unknown, that goes back when it is done with.
    fn borrow(&self, len: usize) -> Spare<'_> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let best = spare.iter().enumerate().filter(|(_, b)| b.len() >= len).min_by_key(|(_, b)| b.len());
        let buffer = match best.map(|(i, _)| i) {
            Some(index) => spare.swap_remove(index),
            None => {
                drop(spare);
                vec![0.0; len.next_power_of_two()]
            }
        };
        Spare { backend: self, buffer }
    }

    fn pointer(&self, view: View) -> *mut u8 {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        let arena = &arenas[view.arena.0 as usize];
        assert!(view.offset + view.bytes() <= arena.bytes(), "{view:?} leaves its arena");
        assert!(view.offset.is_multiple_of(view.dtype.size() as u64), "{view:?} is not aligned");
        // SAFETY: the offset lies within the arena, or is its end for an empty view.
        unsafe { arena.start().add(view.offset as usize) }
    }

    /// The elements of a view.
    fn read<T: element::Stored>(&self, view: View) -> &[T] {
        assert_eq!(view.dtype, T::DTYPE);
        // SAFETY: `pointer` checked bounds and alignment; arenas live as long as the backend and any bytes are a `T`; the
        // plan's verifier proves that nobody writes these bytes while this operation runs (see `Backend`).
        unsafe { std::slice::from_raw_parts(self.pointer(view).cast(), view.len) }
    }

    /// The elements of a view, to be written.
    #[allow(clippy::mut_from_ref)] // interior mutability: an arena is a cell that the plan shares out
    fn write<T: element::Stored>(&self, view: View) -> &mut [T] {
        assert_eq!(view.dtype, T::DTYPE);
        // SAFETY: as in `read`, and the plan's verifier proves that nobody else touches these bytes while this operation
        // runs. Operations whose arguments may name one view twice (dx over dy) never hold two slices of it at once.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(view).cast(), view.len) }
    }
}

/// A borrowed buffer.
struct Spare<'a> {
    backend: &'a CpuBackend,
    buffer: Vec<f32>,
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        let mut spare = self.backend.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(std::mem::take(&mut self.buffer));
    }
}

/// A pointer to the start of a slice that pieces of work write disjoint parts of.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T, usize);

// SAFETY: `part` is only called with disjoint ranges by concurrent pieces, which `pieces` hands out.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr(), slice.len())
    }

    /// Elements `range`. Concurrent callers must ask for disjoint ranges.
    #[allow(clippy::mut_from_ref)]
    fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: in bounds, and disjoint from what other pieces ask for by the contract above.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

/// `Err` that names what does not fit.
fn shape(operation: &'static str, detail: impl Into<String>) -> DeviceError {
    DeviceError::Shape { operation, detail: detail.into() }
}

/// Checks a view's length.
fn length(operation: &'static str, name: &str, view: View, len: usize) -> Result {
    if view.len == len {
        return Ok(());
    }
    Err(shape(operation, format!("{name} has {} elements, {len} are needed", view.len)))
}

/// Checks a view's element type.
fn typed(operation: &'static str, name: &str, view: View, dtype: DType) -> Result {
    if view.dtype == dtype {
        return Ok(());
    }
    Err(shape(operation, format!("{name} is {}, {dtype} is needed", view.dtype)))
}

/// Checks both.
fn is(operation: &'static str, name: &str, view: View, dtype: DType, len: usize) -> Result {
    typed(operation, name, view, dtype)?;
    length(operation, name, view, len)
}

/// Checks that a view holds a floating type that models compute in.
fn float(operation: &'static str, name: &str, view: View) -> Result {
    match view.dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(()),
        other => Err(shape(operation, format!("{name} is {other}, a floating type is needed"))),
    }
}

/// Scratch sizes of the CPU backend, where there is no backend at hand.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuSizes;

impl ScratchSizes for CpuSizes {
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes {
        norm::scratch(rows, width)
    }

    fn attention_scratch(&self, _shape: AttentionShape, _dtype: DType) -> Bytes {
        // Blocks of scores are small and stay in the backend's own buffers.
        Bytes(0)
    }
}

impl ScratchSizes for CpuBackend {
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes {
        CpuSizes.norm_backward_scratch(rows, width)
    }

    fn attention_scratch(&self, shape: AttentionShape, dtype: DType) -> Bytes {
        CpuSizes.attention_scratch(shape, dtype)
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        let plural = if self.threads == 1 { "" } else { "s" };
        format!("cpu ({} thread{plural})", self.threads)
    }

    fn is_asynchronous(&self) -> bool {
        false
    }

    fn allocate(&self, place: Place, bytes: Bytes) -> Result<ArenaId> {
        let arena = Arena::new(place, bytes)?;
        let mut arenas = self.arenas.write().unwrap_or_else(PoisonError::into_inner);
        arenas.push(arena);
        Ok(ArenaId(arenas.len() as u32 - 1))
    }

    fn allocated(&self, place: Place) -> Bytes {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        arenas.iter().filter(|a| a.place() == place).map(|a| Bytes(a.bytes())).sum()
    }

    fn upload(&self, src: &[u8], dst: View) -> Result {
        if src.len() as u64 != dst.bytes() {
            return Err(shape("upload", format!("{} bytes into a view of {}", src.len(), dst.bytes())));
        }
        self.bytes_of(dst).copy_from_slice(src);
        Ok(())
    }

    fn download(&self, src: View, dst: &mut [u8]) -> Result {
        if dst.len() as u64 != src.bytes() {
            return Err(shape("download", format!("a view of {} bytes into {}", src.bytes(), dst.len())));
        }
        dst.copy_from_slice(self.bytes_of(src));
        Ok(())
    }

    fn host_pointer(&self, view: View) -> Option<*mut u8> {
        Some(self.pointer(view))
    }

    fn record(&self, lane: Lane) -> Result<Mark> {
        Ok(Mark { lane, number: 0 })
    }

    fn wait(&self, _lane: Lane, _mark: Mark) -> Result {
        Ok(())
    }

    fn synchronize(&self, _lane: Lane) -> Result {
        Ok(())
    }

    fn fill(&self, _lane: Lane, dst: View, value: f32) -> Result {
        self.fill_op(dst, value)
    }

    fn copy(&self, _lane: Lane, src: View, dst: View) -> Result {
        self.copy_op(src, dst)
    }

    fn cast(&self, _lane: Lane, src: View, dst: View) -> Result {
        self.cast_op(src, dst)
    }

    fn add_assign(&self, _lane: Lane, src: View, dst: View) -> Result {
        self.add_assign_op(src, dst)
    }

    fn matmul(&self, _lane: Lane, args: Matmul) -> Result {
        self.matmul_op(&args)
    }

    fn bias_grad(&self, _lane: Lane, dy: View, grad: View, rows: usize, columns: usize) -> Result {
        self.bias_grad_op(dy, grad, rows, columns)
    }

    fn embedding_forward(&self, _lane: Lane, args: Embedding, y: View) -> Result {
        self.embedding_forward_op(&args, y)
    }

    fn embedding_backward(&self, _lane: Lane, args: Embedding, dy: View) -> Result {
        self.embedding_backward_op(&args, dy)
    }

    fn norm_forward(&self, _lane: Lane, args: NormForward) -> Result {
        self.norm_forward_op(&args)
    }

    fn norm_backward(&self, _lane: Lane, args: NormBackward) -> Result {
        self.norm_backward_op(&args)
    }

    fn rope(&self, _lane: Lane, args: Rope) -> Result {
        self.rope_op(&args)
    }

    fn attention_forward(&self, _lane: Lane, args: Attention) -> Result {
        self.attention_forward_op(&args)
    }

    fn attention_backward(&self, _lane: Lane, args: AttentionBackward) -> Result {
        self.attention_backward_op(&args)
    }

    fn gelu_forward(&self, _lane: Lane, x: View, y: View) -> Result {
        self.gelu_forward_op(x, y)
    }

    fn gelu_backward(&self, _lane: Lane, x: View, dy: View, dx: View) -> Result {
        self.gelu_backward_op(x, dy, dx)
    }

    fn swiglu_forward(&self, _lane: Lane, x: View, y: View, rows: usize, width: usize) -> Result {
        self.swiglu_forward_op(x, y, rows, width)
    }

    fn swiglu_backward(&self, _lane: Lane, x: View, dy: View, dx: View, rows: usize, width: usize) -> Result {
        self.swiglu_backward_op(x, dy, dx, rows, width)
    }

    fn cross_entropy(&self, _lane: Lane, args: CrossEntropy) -> Result {
        self.cross_entropy_op(&args)
    }

    fn norm_partial(&self, _lane: Lane, src: View, partial: View) -> Result {
        self.norm_partial_op(src, partial)
    }

    fn step_scalars(&self, _lane: Lane, args: StepScalars) -> Result {
        self.step_scalars_op(&args)
    }

    fn adamw(&self, _lane: Lane, args: AdamW) -> Result {
        self.adamw_op(&args)
    }
}
