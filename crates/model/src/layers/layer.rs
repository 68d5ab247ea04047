use gpurun_device::{DeviceError, ScratchSizes};
use gpurun_types::{DType, View};

use crate::{BatchShape, Cx, Param, Tensor};

/// What a layer's kernels can do on the way. A combinator does by other means what a layer cannot, so `false` is always right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// The forward adds [`ForwardIo::add`] to its output.
    pub add: bool,
    /// The backward adds [`BackwardIo::carry`] to `dx`.
    pub carry: bool,
    /// The backward may be given `dx` and `x` as one view: it reads `x` for the last time before it writes `dx`.
    pub dx_over_x: bool,
    /// The backward may be given `dx` and `dy` as one view.
    pub dx_over_dy: bool,
    /// The forward costs little beside its neighbours, so its output is computed again in the backward and not kept.
    pub cheap: bool,
    /// [`Layer::backward_input`] does not read `x`.
    pub input_without_x: bool,
}

/// What a forward works on. `[tokens, width]` tensors are row-major and of type `cx.dtype`.
#[derive(Clone, Copy)]
pub struct ForwardIo<'a> {
    /// The parameters, in the order of [`Layer::params`].
    pub weights: &'a [View],
    /// `[tokens, input_width]`, never written.
    pub x: View,
    /// `[tokens, output_width]`: receives the result.
    pub y: View,
    /// `[tokens, output_width]`, added to the result; given only to a layer with [`Capabilities::add`]. Never `y`.
    pub add: Option<View>,
    /// The tensors of [`Layer::saved`], to be filled.
    pub saved: &'a [View],
}

/// What a backward works on.
#[derive(Clone, Copy)]
pub struct BackwardIo<'a> {
    /// The parameters, in the order of [`Layer::params`].
    pub weights: &'a [View],
    /// fp32 gradients of the parameters, to be added to.
    pub grads: &'a [View],
    /// `[tokens, input_width]`: the forward's input.
    pub x: View,
    /// `[tokens, output_width]`: gradient of the forward's output (without `add`).
    pub dy: View,
    /// `[tokens, input_width]`: receives the gradient of the input. `x` or `dy` only as [`Capabilities`] allow.
    pub dx: View,
    /// `[tokens, input_width]`, added to `dx`; given only to a layer with [`Capabilities::carry`]. Never `dx`.
    pub carry: Option<View>,
    /// The tensors of [`Layer::saved`], as the forward left them; may be overwritten, but for what a second part reads.
    pub saved: &'a [View],
}

/// What the second part of a split backward works on.
#[derive(Clone, Copy)]
pub struct WeightsIo<'a> {
    /// The parameters, in the order of [`Layer::params`].
    pub weights: &'a [View],
    /// fp32 gradients of the parameters, to be added to.
    pub grads: &'a [View],
    /// `[tokens, input_width]`: the forward's input.
    pub x: View,
    /// `[tokens, output_width]`: gradient of the forward's output.
    pub dy: View,
    /// The tensors of [`Layer::saved`], as the first part left them.
    pub saved: &'a [View],
    /// The tensors of [`Layer::deferred`], as the first part left them.
    pub deferred: &'a [View],
}

/// What a restoration works on.
#[derive(Clone, Copy)]
pub struct RestoreIo<'a> {
    /// The parameters, in the order of [`Layer::params`].
    pub weights: &'a [View],
    /// `[tokens, input_width]`: the forward's input.
    pub x: View,
    /// The tensors of [`Layer::saved`]: those of [`Layer::restorable`] are to be filled, the others are as the forward left
    /// them.
    pub saved: &'a [View],
}

/// A map from `[tokens, input_width]` to `[tokens, output_width]` with its gradient.
///
/// How many tensors `saved`, `deferred` and `params` list must not depend on the batch. `cx.scratch` holds the views of
/// [`Layer::scratch`].
pub trait Layer: Send + Sync {
    /// A few words for messages, for example `linear mlp.c_fc`.
    fn describe(&self) -> String;

    /// Elements per token that come in.
    fn input_width(&self) -> usize;

    /// Elements per token that go out.
    fn output_width(&self) -> usize;

    /// Parameters, by full name.
    fn params(&self) -> Vec<Param> {
        Vec::new()
    }

    /// Tensors kept from forward to backward, besides the input.
    fn saved(&self, _shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        Vec::new()
    }

    /// Which of the tensors of [`Layer::saved`] [`Layer::restore`] can compute again, ascending: those that are wide for the
    /// arithmetic they take. Selective recompute frees them after the forward.
    fn restorable(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Floating-point operations of [`Layer::restore`] for one token.
    fn restore_flops_per_token(&self, _seq: usize) -> f64 {
        0.0
    }

    /// Fills the tensors of [`Layer::restorable`] with the bits that the forward gave them.
    fn restore(&self, _cx: &Cx<'_>, _io: RestoreIo<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Scratch that any pass needs.
    fn scratch(&self, _sizes: &dyn ScratchSizes, _shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        Vec::new()
    }

    /// Floating-point operations of the forward for one token, as [`crate::Unit::forward_flops_per_token`] counts them.
    fn forward_flops_per_token(&self, _seq: usize) -> f64 {
        0.0
    }

    /// What the layer's kernels can do on the way.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Computes `y`, and fills `saved`.
    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError>;

    /// Adds to `grads`, and computes `dx`.
    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError>;

    /// What [`Layer::backward_input`] leaves for [`Layer::backward_weights`] besides the input, the gradient of the output and
    /// the saved tensors, which both see; `None`, when the first does the whole backward and the second nothing.
    fn deferred(&self, _shape: BatchShape, _dtype: DType) -> Option<Vec<Tensor>> {
        None
    }

    /// Floating-point operations of [`Layer::backward_weights`] for one token.
    fn weights_flops_per_token(&self) -> f64 {
        0.0
    }

    /// The first part of a backward: computes `dx`, fills `deferred`, and adds to `grads` what the second part does not. With
    /// [`Capabilities::input_without_x`], `io.x` may hold anything; the second part sees the forward's input.
    fn backward_input(&self, cx: &Cx<'_>, io: BackwardIo<'_>, _deferred: &[View]) -> Result<(), DeviceError> {
        self.backward(cx, io)
    }

    /// The second part: adds the rest to `grads`. Both parts together give the bits of [`Layer::backward`].
    fn backward_weights(&self, _cx: &Cx<'_>, _io: WeightsIo<'_>) -> Result<(), DeviceError> {
        Ok(())
    }
}
