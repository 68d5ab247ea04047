use gpurun_device::{DeviceError, ScratchSizes};
use gpurun_types::{DType, View};

use crate::layers::{BackwardIo, ForwardIo, Layer, RestoreIo, WeightsIo};
use crate::{BatchShape, Cx, Param, Tensor, Unit};

/// A layer as a unit of the chain: one link between embedding and loss.
pub struct LayerUnit {
    name: String,
    layer: Box<dyn Layer>,
}

impl LayerUnit {
    /// A unit of this name.
    #[must_use]
    pub fn new(name: &str, layer: impl Layer + 'static) -> Self {
        Self { name: name.to_owned(), layer: Box::new(layer) }
    }
}

const EDGES: &str = "a unit between the first and the last has both edges";

impl Unit for LayerUnit {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<Param> {
        self.layer.params()
    }

    fn input_width(&self) -> usize {
        self.layer.input_width()
    }

    fn output_width(&self) -> usize {
        self.layer.output_width()
    }

    fn saved(&self, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        self.layer.saved(shape, dtype)
    }

    fn restorable(&self) -> Vec<usize> {
        self.layer.restorable()
    }

    fn restore_flops_per_token(&self, seq: usize) -> f64 {
        self.layer.restore_flops_per_token(seq)
    }

    fn restore(&self, cx: &Cx<'_>, weights: &[View], x: Option<View>, saved: &[View]) -> Result<(), DeviceError> {
        self.layer.restore(cx, RestoreIo { weights, x: x.expect(EDGES), saved })
    }

    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        self.layer.scratch(sizes, shape, dtype)
    }

    fn forward_flops_per_token(&self, seq: usize) -> f64 {
        self.layer.forward_flops_per_token(seq)
    }

    fn forward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        x: Option<View>,
        y: Option<View>,
        saved: &[View],
    ) -> Result<(), DeviceError> {
        let (x, y) = (x.expect(EDGES), y.expect(EDGES));
        self.layer.forward(cx, ForwardIo { weights, x, y, add: None, saved })
    }

    fn backward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: Option<View>,
        dy: Option<View>,
        dx: Option<View>,
        saved: &[View],
    ) -> Result<(), DeviceError> {
        let (x, dy, dx) = (x.expect(EDGES), dy.expect(EDGES), dx.expect(EDGES));
        self.layer.backward(cx, BackwardIo { weights, grads, x, dy, dx, carry: None, saved })
    }

    fn deferred(&self, shape: BatchShape, dtype: DType) -> Option<Vec<Tensor>> {
        self.layer.deferred(shape, dtype)
    }

    fn weights_flops_per_token(&self) -> f64 {
        self.layer.weights_flops_per_token()
    }

    fn backward_input(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: Option<View>,
        dy: Option<View>,
        dx: Option<View>,
        saved: &[View],
        deferred: &[View],
    ) -> Result<(), DeviceError> {
        let (x, dy, dx) = (x.expect(EDGES), dy.expect(EDGES), dx.expect(EDGES));
        self.layer.backward_input(cx, BackwardIo { weights, grads, x, dy, dx, carry: None, saved }, deferred)
    }

    fn backward_weights(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: Option<View>,
        dy: Option<View>,
        saved: &[View],
        deferred: &[View],
    ) -> Result<(), DeviceError> {
        let (x, dy) = (x.expect(EDGES), dy.expect(EDGES));
        self.layer.backward_weights(cx, WeightsIo { weights, grads, x, dy, saved, deferred })
    }
}
