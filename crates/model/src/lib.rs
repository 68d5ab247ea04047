//! Models as chains of units: a layer library with forward and backward, GPT-2 and Llama.
//!
//! A model knows no rank, no stage and no shard. A [`Unit`] says what it needs (parameters, saved tensors, scratch) and
//! computes over the views it is handed.

use gpurun_device::{Backend, DeviceError, ScratchSizes};
use gpurun_types::{DType, Lane, View};

/// Tokens in one micro-batch of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
}

impl BatchShape {
    /// Tokens in all.
    #[must_use]
    pub const fn tokens(self) -> usize {
        self.batch * self.seq
    }
}

/// How a parameter starts. A pure function of (seed, parameter name, element); see `init`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
}

/// One parameter tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Full name, unique in the model, for example `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Shape, row-major. Linear weights are `[out, in]`.
    pub shape: Vec<usize>,
    /// Starting values.
    pub init: Init,
    /// Weight decay applies (matrices and tables; not biases and norm weights).
    pub decay: bool,
}

impl Param {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor that a unit keeps from forward to backward, or needs as scratch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name for memory reports, for example `qkv`, `logits`.
    pub name: &'static str,
    /// Elements.
    pub elements: usize,
    /// Element type.
    pub dtype: DType,
}

/// What a pass through the model is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forward and backward; saved tensors are kept.
    Train,
    /// Forward with loss only; saved tensors are scratch.
    Evaluate,
}

/// Everything a unit may touch besides its weights and edges.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// Where operations run.
    pub backend: &'a dyn Backend,
    /// The lane they run on.
    pub lane: Lane,
    /// Sizes of the micro-batch.
    pub shape: BatchShape,
    /// Type of weights and activations.
    pub dtype: DType,
    /// What the pass is for.
    pub mode: Mode,
    /// i32 `[tokens]`: token ids.
    pub tokens: View,
    /// i32 `[tokens]`: the next token, or negative where there is no loss.
    pub targets: View,
    /// i32 `[tokens]`: index in its sequence of the first token of the token's document.
    pub starts: View,
    /// The tensors of [`Unit::scratch`], in order. Contents are lost between calls.
    pub scratch: &'a [View],
    /// fp64 `[1]`: the loss unit adds the summed loss of the micro-batch here.
    pub loss: View,
    /// fp32 `[1]`: loss scale.
    pub loss_scale: View,
    /// One over the loss-bearing tokens of the global batch.
    pub loss_factor: f32,
}

/// A link of the chain: what a user writes.
///
/// The chain starts with a unit that reads `cx.tokens` (`input_width() == 0`) and ends with one that computes the loss
/// (`output_width() == 0`). Between two units runs one edge of `width` elements a token.
///
/// `weights` holds the unit's own parameters in the order of [`Unit::params`], then the borrowed ones in the order of
/// [`Unit::borrows`]. `grads` likewise, fp32, always accumulated into.
pub trait Unit: Send + Sync {
    /// Name, unique in the model, for example `h.0`.
    fn name(&self) -> &str;

    /// Own parameters.
    fn params(&self) -> Vec<Param>;

    /// Full names of parameters that other units own and this one also uses (tied embeddings).
    fn borrows(&self) -> Vec<String> {
        Vec::new()
    }

    /// Elements per token that come in; 0 for the first unit.
    fn input_width(&self) -> usize;

    /// Elements per token that go out; 0 for the loss unit.
    fn output_width(&self) -> usize;

    /// Tensors kept from forward to backward, besides the input, which is always kept.
    fn saved(&self, shape: BatchShape, dtype: DType) -> Vec<Tensor>;

    /// Scratch that either pass needs.
    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Tensor>;

    /// Floating-point operations of the forward for one token (matrix products and attention; a multiply-add is two).
    fn forward_flops_per_token(&self, seq: usize) -> f64;

    /// Computes `y` from `x` and fills `saved`. `x` is `None` in the first unit, `y` in the loss unit.
    ///
    /// The loss unit's forward is called in [`Mode::Evaluate`] only, and adds to `cx.loss`. In training its whole work,
    /// loss included, is in its backward, so that logits need not outlive a chunk of rows.
    fn forward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        x: Option<View>,
        y: Option<View>,
        saved: &[View],
    ) -> Result<(), DeviceError>;

    /// Adds to `grads` and computes `dx` from `dy`. `dy` is `None` in the loss unit, `x` and `dx` in the first unit.
    /// `saved` may be overwritten: it is not read again.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: Option<View>,
        dy: Option<View>,
        dx: Option<View>,
        saved: &[View],
    ) -> Result<(), DeviceError>;

    /// The loss unit's logits of row `row` of `x` into `logits` (`[vocabulary]`, type `cx.dtype`), for sampling.
    fn logits(
        &self,
        _cx: &Cx<'_>,
        _weights: &[View],
        _x: View,
        _row: usize,
        _logits: View,
        _saved: &[View],
    ) -> Result<(), DeviceError> {
        Err(DeviceError::Missing(format!("unit {} computes no logits", self.name())))
    }
}

/// A chain of units.
pub struct Model {
    /// The units, first to last.
    pub units: Vec<Box<dyn Unit>>,
    /// Rows of the embedding table: token ids must be below.
    pub vocabulary: usize,
    /// Longest sequence the model can take (learned positions), if bounded.
    pub max_seq: Option<usize>,
}
