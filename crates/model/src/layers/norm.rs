use gpurun_device::{DeviceError, NormBackward, NormForward, NormKind, ScratchSizes};
use gpurun_types::{DType, View};

use super::scratch::workspace;
use crate::layers::{BackwardIo, Capabilities, ForwardIo, Layer};
use crate::{BatchShape, Cx, Init, Param, Tensor};

/// Layer norm (Ba et al. 2016) or RMS norm (Zhang & Sennrich 2019) of each token.
pub struct Norm {
    kind: NormKind,
    name: String,
    width: usize,
    eps: f32,
}

impl Norm {
    /// Layer norm with parameters `{name}.weight` and `{name}.bias`; `eps` is added to the variance.
    #[must_use]
    pub fn layer(name: &str, width: usize, eps: f32) -> Self {
        Self { kind: NormKind::Layer, name: name.to_owned(), width, eps }
    }

    /// RMS norm with parameter `{name}.weight`; `eps` is added to the mean square.
    #[must_use]
    pub fn rms(name: &str, width: usize, eps: f32) -> Self {
        Self { kind: NormKind::Rms, name: name.to_owned(), width, eps }
    }

    /// `y = norm(x)` over `rows` rows; `stats` are the views of [`Norm::stats`].
    pub(super) fn forward_rows(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        x: View,
        y: View,
        stats: &[View],
        rows: usize,
    ) -> Result<(), DeviceError> {
        cx.backend.norm_forward(
            cx.lane,
            NormForward {
                kind: self.kind,
                x,
                residual: None,
                sum: None,
                weight: weights[0],
                bias: weights.get(1).copied(),
                y,
                mean: stats.get(1).copied(),
                rstd: stats[0],
                rows,
                width: self.width,
                eps: self.eps,
            },
        )
    }

    /// The gradient of [`Norm::forward_rows`]; `dx` may be `io.dy`.
    pub(super) fn backward_rows(
        &self,
        cx: &Cx<'_>,
        io: BackwardIo<'_>,
        scratch: View,
        rows: usize,
    ) -> Result<(), DeviceError> {
        cx.backend.norm_backward(
            cx.lane,
            NormBackward {
                kind: self.kind,
                x: io.x,
                weight: io.weights[0],
                mean: io.saved.get(1).copied(),
                rstd: io.saved[0],
                dy: io.dy,
                carry: io.carry,
                dx: io.dx,
                dweight: io.grads[0],
                dbias: io.grads.get(1).copied(),
                scratch,
                rows,
                width: self.width,
            },
        )
    }

    /// Statistics of `rows` rows: `rstd`, and for layer norm `mean`.
    pub(super) fn stats(&self, rows: usize) -> Vec<Tensor> {
        let names: &[&'static str] = match self.kind {
            NormKind::Layer => &["rstd", "mean"],
            NormKind::Rms => &["rstd"],
        };
        names.iter().map(|name| Tensor { name, elements: rows, dtype: DType::F32 }).collect()
    }

    /// Workspace of the backward over `rows` rows.
    pub(super) fn workspace(&self, sizes: &dyn ScratchSizes, rows: usize) -> Tensor {
        workspace("norm workspace", sizes.norm_backward_scratch(rows, self.width))
    }
}

impl Layer for Norm {
    fn describe(&self) -> String {
        format!("norm {}", self.name)
    }

    fn input_width(&self) -> usize {
        self.width
    }

    fn output_width(&self) -> usize {
        self.width
    }

    fn params(&self) -> Vec<Param> {
        let param = |field: &str, init| Param {
            name: format!("{}.{field}", self.name),
            shape: vec![self.width],
            init,
            decay: false,
        };
        match self.kind {
            NormKind::Layer => vec![param("weight", Init::Ones), param("bias", Init::Zeros)],
            NormKind::Rms => vec![param("weight", Init::Ones)],
        }
    }

    fn saved(&self, shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        self.stats(shape.tokens())
    }

    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        vec![self.workspace(sizes, shape.tokens())]
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { carry: true, dx_over_dy: true, cheap: true, ..Capabilities::default() }
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        self.forward_rows(cx, io.weights, io.x, io.y, io.saved, cx.shape.tokens())
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        self.backward_rows(cx, io, cx.scratch[0], cx.shape.tokens())
    }
}
