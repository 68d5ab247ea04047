use gpurun_device::DeviceError;

use crate::Cx;
use crate::layers::{BackwardIo, Capabilities, ForwardIo, Layer};

/// `gelu(x)`, tanh approximation (Hendrycks & Gimpel 2016).
pub struct Gelu {
    width: usize,
}

impl Gelu {
    /// Over `width` elements a token.
    #[must_use]
    pub fn new(width: usize) -> Self {
        Self { width }
    }
}

impl Layer for Gelu {
    fn describe(&self) -> String {
        "gelu".to_owned()
    }

    fn input_width(&self) -> usize {
        self.width
    }

    fn output_width(&self) -> usize {
        self.width
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { dx_over_dy: true, cheap: true, ..Capabilities::default() }
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        cx.backend.gelu_forward(cx.lane, io.x, io.y)
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        cx.backend.gelu_backward(cx.lane, io.x, io.dy, io.dx)
    }
}

/// `silu(gate) * up` (Shazeer 2020), of rows that hold `gate` and then `up`.
pub struct SwiGlu {
    width: usize,
}

impl SwiGlu {
    /// From `2 * width` elements a token to `width`.
    #[must_use]
    pub fn new(width: usize) -> Self {
        Self { width }
    }
}

impl Layer for SwiGlu {
    fn describe(&self) -> String {
        "swiglu".to_owned()
    }

    fn input_width(&self) -> usize {
        2 * self.width
    }

    fn output_width(&self) -> usize {
        self.width
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { dx_over_x: true, cheap: true, ..Capabilities::default() }
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        cx.backend.swiglu_forward(cx.lane, io.x, io.y, cx.shape.tokens(), self.width)
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        cx.backend.swiglu_backward(cx.lane, io.x, io.dy, io.dx, cx.shape.tokens(), self.width)
    }
}
