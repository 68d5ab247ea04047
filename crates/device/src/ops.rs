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

/// AdamW (Loshchilov & Hutter 2019) over any number of runs, in one launch on a device and one pass on the host. When
/// `ScalarSlot::Skip` is 1, `master`, `m` and `v` stay as they are; `weight` is written all the same, because it may never
/// have been written before (the first step may be a skipped one).
///
/// With `g = grad * GradFactor`, `r1 = 1 / BiasCorrection1` and `r2 = 1 / BiasCorrection2Sqrt`:
/// `m = beta1 * m + (1 - beta1) * g`, `v = beta2 * v + (1 - beta2) * (g * g)`, `u = (m * r1) / (sqrt(v) * r2 + eps)`,
/// `w = w - LearningRate * (u + weight_decay * w)`. Every operation is rounded to fp32 by itself (no contraction), so host
/// and device give the same bits, however parameters are cut into runs. `u` uses the moments before they are rounded to
/// their storage type.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// The runs. No two share an element; each kind of view has one type in all of them.
    pub runs: &'a [AdamRun],
    /// fp32 `[ScalarSlot::COUNT]`.
    pub scalars: View,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// One contiguous run of parameters that share a weight decay.
#[derive(Clone, Copy, Debug)]
pub struct AdamRun {
    /// fp32 master weights, updated.
    pub master: View,
    /// First moment: fp32, or bf16 with stochastic rounding (see [`RoundingKey`]).
    pub m: View,
    /// Second moment, type of `m`.
    pub v: View,
    /// fp32 gradient (or bf16, when the gradient travelled so).
    pub grad: View,
    /// The weights in compute precision, rounded to nearest from `master`; `None` when `master` is the weight.
    pub weight: Option<View>,
    /// Decoupled weight decay (0 for vectors).
    pub weight_decay: f32,
    /// Where the random bits of the run's first element are. Not used with fp32 moments.
    pub rounding: RoundingKey,
}

/// Random bits that round moments to bf16: a pure function of seed, buffer, step and element, so that every way to cut and
/// place the parameters rounds alike.
///
/// An fp32 number lies between two of bf16 (or is one). Stochastic rounding takes the one farther from zero with the
/// probability of the distance to the other: 16 random bits are added to the bits below those that are kept, which are
/// then cut off. The expected result is the number itself, so that small updates are not lost on average. NaN stays NaN.
///
/// With `key = mix(stream + step * 0x9e3779b97f4a7c15)` (`step` is `ScalarSlot::AdamSteps`) and `i` the element's index, both
/// halves of `i` and `key` taken apart: `x = low(i) + 0x85ebca6b * high(i) + low(key)`, `x ^= x >> 16`, `x *= 0x7feb352d`,
/// `x ^= high(key)`, `x ^= x >> 15`, `x *= 0x846ca68b`, `x ^= x >> 16` in 32 bits, without carry (the multipliers are those
/// of C. Wellons's `lowbias32`). `m` takes the low half of `x`, `v` the high one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundingKey {
    /// Which sequence of bits: one for each seed and buffer.
    pub stream: u64,
    /// Index of the first element in its buffer.
    pub first: u64,
}

impl RoundingKey {
    /// For element `first` of buffer number `buffer`.
    #[must_use]
    pub const fn new(seed: u64, buffer: u32, first: u64) -> Self {
        Self { stream: mix(mix(seed) ^ buffer as u64), first }
    }

    /// The same for the element `offset` further on.
    #[must_use]
    pub const fn at(self, offset: usize) -> Self {
        Self { stream: self.stream, first: self.first + offset as u64 }
    }

    /// The key of one step.
    pub(crate) const fn of_step(self, step: u64) -> [u32; 2] {
        let key = mix(self.stream.wrapping_add(step.wrapping_mul(GOLDEN)));
        [key as u32, (key >> 32) as u32]
    }
}

/// 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mixing function of SplitMix64 (Steele et al. 2014), with its increment.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(GOLDEN);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The sum of squares of one stretch; see [`crate::Backend::norm_partial`].
#[derive(Clone, Copy, Debug)]
pub struct NormRun {
    /// fp32.
    pub src: View,
    /// fp64 `[1]`.
    pub partial: View,
}
