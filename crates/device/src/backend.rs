use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

use crate::ops::*;

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena could not be allocated.
    #[error("cannot allocate {bytes} of {place} memory for one arena: {reason}")]
    OutOfMemory {
        /// Where the arena was wanted.
        place: Place,
        /// How large it was to be.
        bytes: Bytes,
        /// What the system said.
        reason: String,
    },
    /// Views whose lengths or element types do not fit together: a bug of the caller.
    #[error("{operation}: {detail}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// What does not fit.
        detail: String,
    },
    /// The device or one of its libraries failed.
    #[error("{operation} failed: {reason}")]
    Failed {
        /// The operation or library call.
        operation: String,
        /// What the library said.
        reason: String,
    },
    /// There is no such device here.
    #[error("{0}")]
    Missing(String),
}

/// A point in a lane's work. Numbers grow within a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The lane it was recorded on.
    pub lane: Lane,
    /// Its number.
    pub number: u64,
}

/// Where a lane's work goes and where views lie, as other libraries that enqueue work there need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raw {
    /// The lane's stream: a `CUstream`.
    pub stream: *mut std::ffi::c_void,
    /// Device address of each view.
    pub addresses: Vec<u64>,
}

type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Scratch that a kind of device needs for some operations. Pure, so that a plan can be made where there is no device.
pub trait ScratchSizes: Send + Sync {
    /// Bytes of scratch that [`Backend::norm_backward`] needs.
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes;

    /// Bytes of scratch that attention needs, the larger of forward and backward.
    fn attention_scratch(&self, shape: AttentionShape, dtype: DType) -> Bytes;

    /// Bytes that the logits of one chunk of rows should stay within. Fewer, larger chunks suit a device that needs large
    /// matrix products to be busy.
    fn logits_budget(&self) -> Bytes {
        Bytes(64 << 20)
    }
}

/// A device: arenas and operations.
///
/// On a synchronous backend (the CPU) an operation runs on the calling thread (and the backend's own pool) and is done
/// when it returns; `record`, `wait` and `synchronize` do nothing. On an asynchronous one (CUDA) an operation is
/// enqueued on the stream of its lane. Operations on host arenas (`adamw`, `cast`, `fill`, `norm_partial` with
/// [`Lane::Host`]) run on host threads on every backend.
pub trait Backend: ScratchSizes {
    /// Name for messages, for example `cpu (2 threads)` or `NVIDIA H200`.
    fn name(&self) -> String;

    /// True when operations are enqueued and return before they ran.
    fn is_asynchronous(&self) -> bool;

    // ---- memory ----

    /// Allocates an arena, zeroed and aligned to at least 256 bytes. Arenas live as long as the backend, or until
    /// they are released. All of the memory is there when this returns: nothing is left to be brought in at first use.
    fn allocate(&self, place: Place, bytes: Bytes) -> Result<ArenaId>;

    /// Gives an arena's memory back, for arenas that are needed for a while only. No work may use it any more; views of it are
    /// refused from now on, as views that leave their arena.
    fn release(&self, arena: ArenaId) -> Result;

    /// Bytes now allocated at `place`.
    fn allocated(&self, place: Place) -> Bytes;

    /// Copies host bytes into `dst` and returns when done. `src.len()` must be `dst.bytes()`. Not for use inside a step.
    fn upload(&self, src: &[u8], dst: View) -> Result;

    /// Copies `src` into host bytes and returns when done. Not for use inside a step.
    fn download(&self, src: View, dst: &mut [u8]) -> Result;

    /// The address of a view in host memory, for host-side communicators and tests; `None` on device memory that the
    /// host cannot address. The pointer is valid as long as the backend.
    fn host_pointer(&self, view: View) -> Option<*mut u8>;

    // ---- lanes ----

    /// Marks the work enqueued on `lane` so far.
    fn record(&self, lane: Lane) -> Result<Mark>;

    /// Makes later work on `lane` wait for `mark`.
    fn wait(&self, lane: Lane, mark: Mark) -> Result;

    /// Blocks until all work on `lane` is done, and reports errors of work that ran asynchronously.
    fn synchronize(&self, lane: Lane) -> Result;

    /// True when all work before `mark` is done. Never blocks.
    fn passed(&self, _mark: Mark) -> Result<bool> {
        Ok(true)
    }

    /// Makes the device current on the calling thread and gives what another library needs to enqueue work of its own on
    /// `lane`, after views have been checked.
    ///
    /// # Errors
    /// On devices without streams, and when a view leaves its arena.
    fn raw(&self, operation: &'static str, _lane: Lane, _views: &[View]) -> Result<Raw> {
        Err(DeviceError::Missing(format!("{operation}: {} has no streams", self.name())))
    }

    // ---- operations ----

    /// Sets every element to `value` (converted to the view's type).
    fn fill(&self, lane: Lane, dst: View, value: f32) -> Result;

    /// Copies elements of one type, within or between arenas, host and device alike.
    fn copy(&self, lane: Lane, src: View, dst: View) -> Result;

    /// Converts between fp32, bf16 and fp16, rounding to nearest even.
    fn cast(&self, lane: Lane, src: View, dst: View) -> Result;

    /// `dst += src`, both of one floating type.
    fn add_assign(&self, lane: Lane, src: View, dst: View) -> Result;

    /// Matrix product; see [`Matmul`].
    fn matmul(&self, lane: Lane, args: Matmul) -> Result;

    /// `grad[j] += sum_i dy[i, j]`; `dy` is `[rows, columns]`, `grad` is fp32 `[columns]`.
    fn bias_grad(&self, lane: Lane, dy: View, grad: View, rows: usize, columns: usize) -> Result;

    /// Token (and position) embedding; see [`Embedding`].
    fn embedding_forward(&self, lane: Lane, args: Embedding, y: View) -> Result;

    /// Adds the gradient of [`Backend::embedding_forward`] to fp32 tables, in token order (same bits every run).
    /// `args.table` and `args.positions` are the gradient tables here.
    fn embedding_backward(&self, lane: Lane, args: Embedding, dy: View) -> Result;

    /// Layer norm or RMS norm, with the residual addition before it fused; see [`NormForward`].
    fn norm_forward(&self, lane: Lane, args: NormForward) -> Result;

    /// Gradient of [`Backend::norm_forward`]; see [`NormBackward`].
    fn norm_backward(&self, lane: Lane, args: NormBackward) -> Result;

    /// Rotary position embedding in place; see [`Rope`].
    fn rope(&self, lane: Lane, args: Rope) -> Result;

    /// Causal attention; see [`Attention`].
    fn attention_forward(&self, lane: Lane, args: Attention) -> Result;

    /// Promises that every element of `starts` of attention calls enqueued from now on is zero, or takes that back: sequences
    /// are one document each. Some devices have faster kernels for those; nothing is promised at first.
    fn whole_documents(&self, _whole: bool) {}

    /// Gradient of [`Backend::attention_forward`]; see [`AttentionBackward`].
    fn attention_backward(&self, lane: Lane, args: AttentionBackward) -> Result;

    /// `y = gelu(x)`, tanh approximation (Hendrycks & Gimpel 2016).
    fn gelu_forward(&self, lane: Lane, x: View, y: View) -> Result;

    /// `dx = dy * gelu'(x)`; `dx` may be `dy`.
    fn gelu_backward(&self, lane: Lane, x: View, dy: View, dx: View) -> Result;

    /// `y[i, j] = silu(x[i, j]) * x[i, width + j]`; `x` is `[rows, 2 * width]`: gate, then up (Shazeer 2020).
    fn swiglu_forward(&self, lane: Lane, x: View, y: View, rows: usize, width: usize) -> Result;

    /// Gradient of [`Backend::swiglu_forward`]; `dx` is `[rows, 2 * width]` and may be `x`.
    fn swiglu_backward(&self, lane: Lane, x: View, dy: View, dx: View, rows: usize, width: usize) -> Result;

    /// Fused cross-entropy; see [`CrossEntropy`].
    fn cross_entropy(&self, lane: Lane, args: CrossEntropy) -> Result;

    /// `partial[0] = sum_i src[i]^2` in fp64, for each of the runs.
    ///
    /// The order is the same on every backend, and each run's is its own. Pieces of 4096 elements (the last may be shorter) are
    /// summed by themselves: 32 sums take the elements in turn (element `i` of the piece goes to sum `i % 32`), then the upper
    /// half of the sums is added onto the lower one, until one is left. The sums of the pieces are added up in the same way
    /// with 256 sums. Each sum starts from zero.
    fn norm_partial(&self, lane: Lane, runs: &[NormRun]) -> Result;

    /// The global decisions of a step; see [`StepScalars`].
    fn step_scalars(&self, lane: Lane, args: StepScalars) -> Result;

    /// AdamW over runs of parameters; see [`AdamW`].
    fn adamw(&self, lane: Lane, args: &AdamW<'_>) -> Result;

    /// `dst = a + 3 b` in fp32 host memory on the host's threads: the triad by which memory bandwidth is measured (McCalpin's
    /// STREAM), 12 bytes an element. With `past_caches` the stores go to memory directly, where the processor can.
    fn triad(&self, dst: View, a: View, b: View, past_caches: bool) -> Result;
}
