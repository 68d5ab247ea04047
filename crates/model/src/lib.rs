//! Models as chains of units: a layer library with forward and backward, GPT-2 and Llama.
//!
//! A model knows no rank, no stage and no shard. A [`Unit`] says what it needs (parameters, saved tensors, scratch) and
//! computes over the views it is handed.
//!
//! - [`ModelConfig`] describes a GPT-2 or Llama model (presets, Hugging Face's `config.json`) and builds it.
//! - [`mod@layers`] are the parts, with forward and backward, and how they compose into models of one's own.
//! - [`init`] gives every parameter its starting values.
//! - [`gradcheck`] compares a unit's gradients with finite differences; [`mod@reference`] runs a whole model without a plan.
#![forbid(unsafe_code)]

mod config;
mod error;
mod gpt2;
pub mod gradcheck;
mod hugging_face;
pub mod init;
pub mod layers;
mod llama;
mod presets;
pub mod reference;
mod views;

pub use config::{Family, ModelConfig, RopeScalingConfig, build};
pub use error::ModelError;
pub use hugging_face::Dropout;
pub use presets::NAMES as PRESETS;
pub use views::{JOIN_ALIGN, join};

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

    /// Which of the tensors of [`Unit::saved`] [`Unit::restore`] can compute again, ascending. Selective recompute frees them
    /// after the forward and restores them before the backward.
    fn restorable(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Floating-point operations of [`Unit::restore`] for one token.
    fn restore_flops_per_token(&self, _seq: usize) -> f64 {
        0.0
    }

    /// Fills the tensors of [`Unit::restorable`] with the bits that the forward gave them; the others of `saved` are as it
    /// left them.
    fn restore(&self, _cx: &Cx<'_>, _weights: &[View], _x: Option<View>, _saved: &[View]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Scratch that any pass needs.
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

    /// What [`Unit::backward_input`] leaves for [`Unit::backward_weights`] besides what both see, for orders of a pipeline that
    /// compute the gradients of weights apart; `None`, when a backward is always whole. Units at the ends of the chain, and
    /// those that borrow parameters, have whole backwards only.
    fn deferred(&self, _shape: BatchShape, _dtype: DType) -> Option<Vec<Tensor>> {
        None
    }

    /// Floating-point operations of [`Unit::backward_weights`] for one token.
    fn weights_flops_per_token(&self) -> f64 {
        0.0
    }

    /// The first part of a backward: computes `dx` from `dy`, fills `deferred`, and adds to `grads` what the second part does
    /// not.
    #[allow(clippy::too_many_arguments)]
    fn backward_input(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: Option<View>,
        dy: Option<View>,
        dx: Option<View>,
        saved: &[View],
        _deferred: &[View],
    ) -> Result<(), DeviceError> {
        self.backward(cx, weights, grads, x, dy, dx, saved)
    }

    /// The second part: adds the rest to `grads`. `saved` and `deferred` are as the first part left them. Both parts together
    /// give the bits of [`Unit::backward`].
    #[allow(clippy::too_many_arguments)]
    fn backward_weights(
        &self,
        _cx: &Cx<'_>,
        _weights: &[View],
        _grads: &[View],
        _x: Option<View>,
        _dy: Option<View>,
        _saved: &[View],
        _deferred: &[View],
    ) -> Result<(), DeviceError> {
        Ok(())
    }

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

impl Model {
    /// A chain whose parts fit together.
    ///
    /// # Errors
    /// [`ModelError::Parts`] when the chain does not start without input or end without output, an edge's two widths
    /// differ, a name is used twice, or a borrowed parameter has no owner.
    pub fn new(units: Vec<Box<dyn Unit>>, vocabulary: usize, max_seq: Option<usize>) -> Result<Self, ModelError> {
        let model = Self { units, vocabulary, max_seq };
        model.check_edges()?;
        model.check_names()?;
        Ok(model)
    }

    fn check_edges(&self) -> Result<(), ModelError> {
        let fail = |part: &str, problem: String| Err(ModelError::Parts { part: format!("unit {part}"), problem });
        let (Some(first), Some(last)) = (self.units.first(), self.units.last()) else {
            return fail("(none)", "a model needs an embedding unit and a loss unit".to_owned());
        };
        if first.input_width() != 0 {
            return fail(first.name(), "the first unit must read tokens (input width 0)".to_owned());
        }
        if last.output_width() != 0 {
            return fail(last.name(), "the last unit must compute the loss (output width 0)".to_owned());
        }
        for pair in self.units.windows(2) {
            let (gives, takes) = (pair[0].output_width(), pair[1].input_width());
            if gives != takes || gives == 0 {
                let problem = format!("it takes {takes} elements per token, but unit {} gives {gives}", pair[0].name());
                return fail(pair[1].name(), problem);
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), ModelError> {
        let mut names = std::collections::HashSet::new();
        let mut params = std::collections::HashSet::new();
        for unit in &self.units {
            let part = || format!("unit {}", unit.name());
            if !names.insert(unit.name()) {
                return Err(ModelError::Parts { part: part(), problem: "another unit has this name".to_owned() });
            }
            for param in unit.params() {
                if let Some(name) = params.replace(param.name) {
                    let problem = format!("parameter {name} is declared twice; to share it, name it in borrows()");
                    return Err(ModelError::Parts { part: part(), problem });
                }
            }
        }
        for unit in &self.units {
            if let Some(name) = unit.borrows().into_iter().find(|name| !params.contains(name)) {
                let problem = format!("it borrows parameter {name}, which no unit owns");
                return Err(ModelError::Parts { part: format!("unit {}", unit.name()), problem });
            }
        }
        Ok(())
    }

    /// All parameters, in the order of units and of their declaration.
    #[must_use]
    pub fn params(&self) -> Vec<Param> {
        self.units.iter().flat_map(|unit| unit.params()).collect()
    }

    /// Floating-point operations of one forward for one token in a sequence of `seq`; a backward takes twice as many.
    #[must_use]
    pub fn forward_flops_per_token(&self, seq: usize) -> f64 {
        self.units.iter().map(|unit| unit.forward_flops_per_token(seq)).sum()
    }
}
