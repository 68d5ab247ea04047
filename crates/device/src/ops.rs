//! Arguments of the operations: plain data. Shapes are in elements.

use gpurun_types::View;

/// `d = op(a) · op(b) (+ bias) (+ residual)`, or `d += op(a) · op(b)` with `accumulate`.
///
/// `op(a)` is `[m, k]`, `op(b)` is `[k, n]`, `d` is `[m, n]`. `a` and `b` share one type; `d` has that type, or fp32.
/// Products are summed in fp32.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[m, k]`, or `[k, m]` when `transpose_a`.
    pub a: View,
    /// `[k, n]`, or `[n, k]` when `transpose_b`.
    pub b: View,
    /// `[m, n]`.
    pub d: View,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Summed dimension.
    pub k: usize,
    /// `a` is stored transposed.
    pub transpose_a: bool,
    /// `b` is stored transposed (a linear layer's weight is stored `[out, in]`).
    pub transpose_b: bool,
    /// Added to every row: `[n]`, type of `a`.
    pub bias: Option<View>,
    /// Added to the result: `[m, n]`, type of `d`. May be `d` itself only through `accumulate`.
    pub residual: Option<View>,
    /// Add to what `d` holds.
    pub accumulate: bool,
}

/// `y[i] = table[tokens[i]] (+ positions[i % seq - starts[i]])`.
///
/// `starts[i]` is the index, within its sequence, of the first token of the document that token `i` belongs to, so
/// positions restart with each packed document.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    /// i32 `[rows]`.
    pub tokens: View,
    /// i32 `[rows]`.
    pub starts: View,
    /// `[vocabulary, width]`.
    pub table: View,
    /// `[>= seq, width]`: learned positions.
    pub positions: Option<View>,
    /// Tokens per sequence; `rows` is a multiple.
    pub seq: usize,
    /// Elements per token.
    pub width: usize,
}

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Layer norm (Ba et al. 2016), biased variance.
    Layer,
    /// RMS norm (Zhang & Sennrich 2019).
    Rms,
}

/// `sum = x + residual` (when given), `y = norm(sum) * weight (+ bias)`. Statistics in fp32.
#[derive(Clone, Copy, Debug)]
pub struct NormForward {
    /// Layer or RMS.
    pub kind: NormKind,
    /// `[rows, width]`.
    pub x: View,
    /// `[rows, width]`, added before the norm.
    pub residual: Option<View>,
    /// `[rows, width]`: receives `x + residual`; present exactly when `residual` is.
    pub sum: Option<View>,
    /// `[width]`.
    pub weight: View,
    /// `[width]`; layer norm only.
    pub bias: Option<View>,
    /// `[rows, width]`.
    pub y: View,
    /// fp32 `[rows]`: the means; layer norm only.
    pub mean: Option<View>,
    /// fp32 `[rows]`: reciprocal standard deviation (or RMS).
    pub rstd: View,
    /// Rows.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
    /// Added to the variance (or mean square).
    pub eps: f32,
}

/// `dx = (carry +) d norm`, `dweight += ..`, `dbias += ..`. The reduction over rows has a fixed order.
#[derive(Clone, Copy, Debug)]
pub struct NormBackward {
    /// Layer or RMS.
    pub kind: NormKind,
    /// What was normalised (`sum` of the forward when there was a residual): `[rows, width]`.
    pub x: View,
    /// `[width]`.
    pub weight: View,
    /// fp32 `[rows]`; layer norm only.
    pub mean: Option<View>,
    /// fp32 `[rows]`.
    pub rstd: View,
    /// `[rows, width]`: gradient of `y`.
    pub dy: View,
    /// `[rows, width]`: gradient that reaches the norm's input by another path (the residual stream). May be `dx`.
    pub carry: Option<View>,
    /// `[rows, width]`. May be `dy` or `carry`.
    pub dx: View,
    /// fp32 `[width]`, accumulated.
    pub dweight: View,
    /// fp32 `[width]`, accumulated; layer norm only.
    pub dbias: Option<View>,
    /// Scratch of at least [`crate::ScratchSizes::norm_backward_scratch`] bytes.
    pub scratch: View,
    /// Rows.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
}

/// Frequency scaling of Llama 3.1 (`rope_type = "llama3"`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// Divides the low frequencies.
    pub factor: f32,
    /// Wavelengths longer than `original_context / low` are fully scaled.
    pub low_frequency: f32,
    /// Wavelengths shorter than `original_context / high` are kept.
    pub high_frequency: f32,
    /// Context length of the original training.
    pub original_context: f32,
}

/// Rotary embedding (Su et al. 2021) over the leading `heads` heads of each row, halves rotated (`x1, x2 = split(x)`, as
/// Hugging Face Llama lays weights out). Rows are `[rows, stride]`; position is `row % seq - starts[row]`.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Rotated in place.
    pub x: View,
    /// i32 `[rows]`.
    pub starts: View,
    /// Rows (tokens).
    pub rows: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Heads to rotate (queries and keys lie first in a packed qkv row).
    pub heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// Optional frequency scaling.
    pub scaling: Option<RopeScaling>,
    /// Rotate backward (the gradient).
    pub inverse: bool,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Elements of one packed row: queries, keys, values.
    #[must_use]
    pub const fn packed_width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Causal softmax attention within documents: query `i` sees keys `starts[i]..=i`.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[batch * seq, packed_width]`: query heads, key heads, value heads.
    pub qkv: View,
    /// i32 `[batch * seq]`.
    pub starts: View,
    /// `[batch * seq, heads * head_dim]`.
    pub out: View,
    /// fp32 `[batch, heads, seq]`: natural log of the sum of exponentials of the scaled scores.
    pub lse: View,
    /// Scratch of [`crate::ScratchSizes::attention_scratch`] bytes.
    pub scratch: View,
    /// Sizes.
    pub shape: AttentionShape,
    /// Factor on the scores, usually `head_dim^-1/2`.
    pub scale: f32,
}

/// Gradient of [`Attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward {
    /// As in the forward.
    pub forward: Attention,
    /// `[batch * seq, heads * head_dim]`.
    pub dout: View,
    /// `[batch * seq, packed_width]`, overwritten.
    pub dqkv: View,
}

/// Cross-entropy of softmax rows, with the gradient written over the logits.
///
/// For each row with target `t >= 0`: `loss = logsumexp(logits) - logits[t]`, summed into `loss` (fp64, `+=`, row order).
/// With `backward`, `logits[j] = (softmax_j - [j == t]) * factor * scale[0]`; rows with target < 0 get zero and no loss.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    /// `[rows, vocabulary]`, overwritten when `backward`.
    pub logits: View,
    /// i32 `[rows]`; negative means ignored.
    pub targets: View,
    /// fp64 `[1]`, accumulated: summed (unscaled) loss.
    pub loss: View,
    /// fp32 `[rows]` scratch for the losses of the rows.
    pub row_losses: View,
    /// fp32 `[1]`: the loss scale.
    pub scale: View,
    /// Constant factor on the gradient: one over the tokens of the global batch.
    pub factor: f32,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub vocabulary: usize,
    /// Write the gradient.
    pub backward: bool,
}

/// Elements of the scalar state that the device keeps between steps (fp32, [`ScalarSlot::COUNT`] elements).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ScalarSlot {
    /// Loss scale in force (1 without scaling).
    LossScale = 0,
    /// Steps in a row without overflow, since the last change of the scale.
    GoodSteps = 1,
    /// Adam steps applied so far (skipped steps do not count).
    AdamSteps = 2,
    /// Steps skipped so far.
    SkippedSteps = 3,
    /// 1 when the current step is skipped, else 0.
    Skip = 4,
    /// Factor on gradients in Adam: clip factor over loss scale.
    GradFactor = 5,
    /// Global gradient norm, before clipping, loss scale removed.
    GradNorm = 6,
    /// Learning rate of this step.
    LearningRate = 7,
    /// `1 - beta1^t`.
    BiasCorrection1 = 8,
    /// `sqrt(1 - beta2^t)`.
    BiasCorrection2Sqrt = 9,
    /// Skipped steps in a row.
    SkippedInARow = 10,
    /// Loss scale that this step's gradients carry (the scale before this step's update).
    UsedLossScale = 11,
}

impl ScalarSlot {
    /// Elements of the scalar buffer (padded).
    pub const COUNT: usize = 16;
}

/// Dynamic loss scaling (Micikevicius et al. 2018).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// Factor after `interval` good steps.
    pub growth: f32,
    /// Factor after an overflow.
    pub backoff: f32,
    /// Good steps between growths.
    pub interval: u32,
    /// Never above this.
    pub max: f32,
    /// Never below this.
    pub min: f32,
}

/// From the partial sums of squares, decides skip, clip factor and bias corrections, and updates the loss scale.
///
/// `norm = sqrt(sum over columns (units) in order of (sum over rows (shards) in order of partials)) / loss_scale`, all in
/// fp64. Not finite: skip. `clip factor = min(1, clip / (norm + 1e-6))`.
#[derive(Clone, Copy, Debug)]
pub struct StepScalars {
    /// fp64 `[shards, units]`: one row per rank of the data-parallel group.
    pub partials: View,
    /// Rows of `partials`.
    pub shards: usize,
    /// Elements from one row to the next.
    pub row: usize,
    /// Leading columns of each row that are units' sums of squares.
    pub units: usize,
    /// fp32 `[ScalarSlot::COUNT]`.
    pub scalars: View,
    /// fp32 `[1]`: learning rate of this step, written by the host before the step.
    pub learning_rate: View,
    /// Largest gradient norm; infinite for none.
    pub clip: f32,
    /// Adam's decay of the first moment.
    pub beta1: f32,
    /// Adam's decay of the second moment.
    pub beta2: f32,
    /// Loss scaling; `None` keeps the scale at 1 (a step that is not finite is skipped all the same).
    pub scaling: Option<LossScaling>,
}

/// AdamW (Loshchilov & Hutter 2019) over one contiguous run. When `ScalarSlot::Skip` is 1, `master`, `m` and `v` stay as they
/// are; `weight` is written all the same, because it may never have been written before (the first step may be a skipped one).
///
/// With `g = grad * GradFactor`: `m = beta1*m + (1-beta1)*g`, `v = beta2*v + (1-beta2)*(g*g)`,
/// `w = w - lr * (m / c1 / (sqrt(v) / c2 + eps) + weight_decay * w)`. Every operation is rounded to fp32 by itself (no
/// contraction), so host and device give the same bits. Order: `u = (m / c1) / (sqrt(v) / c2 + eps)`,
/// `w = w - lr * (u + weight_decay * w)`.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// fp32 master weights, updated.
    pub master: View,
    /// fp32, or bf16 with stochastic rounding.
    pub m: View,
    /// As `m`.
    pub v: View,
    /// fp32 gradient (or bf16, when the gradient travelled so).
    pub grad: View,
    /// The weights in compute precision, rounded from `master`; `None` when `master` is the weight.
    pub weight: Option<View>,
    /// fp32 `[ScalarSlot::COUNT]`.
    pub scalars: View,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay of this run (0 for vectors).
    pub weight_decay: f32,
}
