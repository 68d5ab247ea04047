use gpurun_device::{DeviceError, ScratchSizes};
use gpurun_types::{DType, View};

use crate::layers::{BackwardIo, ForwardIo, Layer, RestoreIo, WeightsIo};
use crate::{BatchShape, Cx, ModelError, Param, Tensor};

/// `y = x + inner(x)`.
///
/// The additions are part of the inner layer's first and last kernels where these can ([`crate::layers::Capabilities`]), and
/// passes of their own where they cannot.
pub struct Residual {
    inner: Box<dyn Layer>,
}

impl Residual {
    /// # Errors
    /// When the inner layer's widths differ.
    pub fn new(inner: impl Layer + 'static) -> Result<Self, ModelError> {
        let (input, output) = (inner.input_width(), inner.output_width());
        if input != output {
            return Err(ModelError::Parts {
                part: format!("residual around {}", inner.describe()),
                problem: format!("it takes {input} elements per token and gives {output}; make the widths equal"),
            });
        }
        Ok(Self { inner: Box::new(inner) })
    }

    /// Both additions are fused.
    fn fused(&self) -> bool {
        let can = self.inner.capabilities();
        can.add && can.carry
    }

    /// Number of own scratch tensors: fp32 copies, as backends add in fp32 only.
    fn own_scratch(&self, dtype: DType) -> usize {
        if self.fused() || dtype == DType::F32 { 0 } else { 2 }
    }

    /// What the inner layer sees.
    fn within<'a>(&self, cx: &Cx<'a>) -> Cx<'a> {
        Cx { scratch: &cx.scratch[self.own_scratch(cx.dtype)..], ..*cx }
    }

    /// `y += x`.
    fn add(&self, cx: &Cx<'_>, x: View, y: View) -> Result<(), DeviceError> {
        if cx.dtype == DType::F32 {
            return cx.backend.add_assign(cx.lane, x, y);
        }
        let (x32, y32) = (cx.scratch[0], cx.scratch[1]);
        cx.backend.cast(cx.lane, x, x32)?;
        cx.backend.cast(cx.lane, y, y32)?;
        cx.backend.add_assign(cx.lane, x32, y32)?;
        cx.backend.cast(cx.lane, y32, y)
    }
}

impl Layer for Residual {
    fn describe(&self) -> String {
        format!("residual {}", self.inner.describe())
    }

    fn input_width(&self) -> usize {
        self.inner.input_width()
    }

    fn output_width(&self) -> usize {
        self.inner.output_width()
    }

    fn params(&self) -> Vec<Param> {
        self.inner.params()
    }

    fn saved(&self, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        self.inner.saved(shape, dtype)
    }

    fn restorable(&self) -> Vec<usize> {
        self.inner.restorable()
    }

    fn restore_flops_per_token(&self, seq: usize) -> f64 {
        self.inner.restore_flops_per_token(seq)
    }

    fn restore(&self, cx: &Cx<'_>, io: RestoreIo<'_>) -> Result<(), DeviceError> {
        self.inner.restore(&self.within(cx), io)
    }

    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        let elements = shape.tokens() * self.input_width();
        let mut scratch = vec![Tensor { name: "residual", elements, dtype: DType::F32 }; self.own_scratch(dtype)];
        scratch.extend(self.inner.scratch(sizes, shape, dtype));
        scratch
    }

    fn forward_flops_per_token(&self, seq: usize) -> f64 {
        self.inner.forward_flops_per_token(seq)
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        let fuse = self.inner.capabilities().add;
        self.inner.forward(&self.within(cx), ForwardIo { add: fuse.then_some(io.x), ..io })?;
        if fuse { Ok(()) } else { self.add(cx, io.x, io.y) }
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        let fuse = self.inner.capabilities().carry;
        self.inner.backward(&self.within(cx), BackwardIo { carry: fuse.then_some(io.dy), ..io })?;
        if fuse { Ok(()) } else { self.add(cx, io.dy, io.dx) }
    }

    fn deferred(&self, shape: BatchShape, dtype: DType) -> Option<Vec<Tensor>> {
        self.inner.deferred(shape, dtype)
    }

    fn weights_flops_per_token(&self) -> f64 {
        self.inner.weights_flops_per_token()
    }

    fn backward_input(&self, cx: &Cx<'_>, io: BackwardIo<'_>, deferred: &[View]) -> Result<(), DeviceError> {
        let fuse = self.inner.capabilities().carry;
        let inner = BackwardIo { carry: fuse.then_some(io.dy), ..io };
        self.inner.backward_input(&self.within(cx), inner, deferred)?;
        if fuse { Ok(()) } else { self.add(cx, io.dy, io.dx) }
    }

    fn backward_weights(&self, cx: &Cx<'_>, io: WeightsIo<'_>) -> Result<(), DeviceError> {
        self.inner.backward_weights(&self.within(cx), io)
    }
}
