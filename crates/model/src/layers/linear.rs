use gpurun_device::{DeviceError, Matmul};
use gpurun_types::{DType, View};

use crate::layers::{BackwardIo, Capabilities, ForwardIo, Layer, WeightsIo};
use crate::views::{JOIN_ALIGN, join};
use crate::{BatchShape, Cx, Init, ModelError, Param, Tensor};

/// `y = x · Wᵀ (+ b)`, with `W` stored `[out, in]`.
///
/// The rows of `W` may be several parameters (q, k and v; gate and up) that lie side by side and are multiplied as one.
pub struct Linear {
    /// Name and rows of each parameter.
    parts: Vec<(String, usize)>,
    input: usize,
    output: usize,
    bias: bool,
    std: f32,
}

impl Linear {
    /// With a bias, weights normal with deviation 0.02. Parameters `{name}.weight` `[output, input]` and `{name}.bias`.
    #[must_use]
    pub fn new(name: &str, input: usize, output: usize) -> Self {
        Self { parts: vec![(name.to_owned(), output)], input, output, bias: true, std: 0.02 }
    }

    /// One product over several parameters, `{name}.weight` `[output, input]` for each `(name, output)` of `parts`; outputs lie
    /// side by side in the same order. With biases.
    ///
    /// # Errors
    /// When a part's size would leave a gap before the next one.
    pub fn joined(parts: &[(&str, usize)], input: usize) -> Result<Self, ModelError> {
        let before_last = parts.len().saturating_sub(1);
        for (name, output) in &parts[..before_last] {
            if !output.is_multiple_of(JOIN_ALIGN) {
                return Err(ModelError::Parts {
                    part: format!("linear {name}"),
                    problem: format!(
                        "{output} outputs are no multiple of {JOIN_ALIGN}, so the parameter cannot lie side by side with the \
                         next one; choose widths and head sizes that are multiples of {JOIN_ALIGN}"
                    ),
                });
            }
        }
        let output = parts.iter().map(|(_, output)| output).sum();
        let parts = parts.iter().map(|&(name, output)| (name.to_owned(), output)).collect();
        Ok(Self { parts, input, output, bias: true, std: 0.02 })
    }

    /// With or without bias.
    #[must_use]
    pub fn bias(self, bias: bool) -> Self {
        Self { bias, ..self }
    }

    /// Standard deviation of the starting weights.
    #[must_use]
    pub fn std(self, std: f32) -> Self {
        Self { std, ..self }
    }

    /// Weight and bias out of a list of views in parameter order.
    fn views(&self, views: &[View]) -> Result<(View, Option<View>), DeviceError> {
        let (weights, biases) = views.split_at(self.parts.len());
        Ok((join(weights)?, if self.bias { Some(join(biases)?) } else { None }))
    }

    /// Number of parameters.
    pub(super) fn param_count(&self) -> usize {
        self.parts.len() * if self.bias { 2 } else { 1 }
    }

    /// Adds the gradients of weight and bias.
    pub(super) fn backward_params(&self, cx: &Cx<'_>, grads: &[View], x: View, dy: View) -> Result<(), DeviceError> {
        let rows = cx.shape.tokens();
        let (dweight, dbias) = self.views(grads)?;
        cx.backend.matmul(
            cx.lane,
            Matmul {
                a: dy,
                b: x,
                d: dweight,
                m: self.output,
                n: self.input,
                k: rows,
                transpose_a: true,
                transpose_b: false,
                bias: None,
                residual: None,
                accumulate: true,
            },
        )?;
        match dbias {
            Some(dbias) => cx.backend.bias_grad(cx.lane, dy, dbias, rows, self.output),
            None => Ok(()),
        }
    }

    /// `dx = dy · W (+ carry)`.
    pub(super) fn backward_x(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        dy: View,
        dx: View,
        carry: Option<View>,
    ) -> Result<(), DeviceError> {
        cx.backend.matmul(
            cx.lane,
            Matmul {
                a: dy,
                b: self.views(weights)?.0,
                d: dx,
                m: cx.shape.tokens(),
                n: self.input,
                k: self.output,
                transpose_a: false,
                transpose_b: false,
                bias: None,
                residual: carry,
                accumulate: false,
            },
        )
    }
}

impl Layer for Linear {
    fn describe(&self) -> String {
        let names: Vec<&str> = self.parts.iter().map(|(name, _)| name.as_str()).collect();
        format!("linear {}", names.join(" + "))
    }

    fn input_width(&self) -> usize {
        self.input
    }

    fn output_width(&self) -> usize {
        self.output
    }

    fn params(&self) -> Vec<Param> {
        let weight = |(name, output): &(String, usize)| Param {
            name: format!("{name}.weight"),
            shape: vec![*output, self.input],
            init: Init::Normal { std: self.std },
            decay: true,
        };
        let bias = |(name, output): &(String, usize)| Param {
            name: format!("{name}.bias"),
            shape: vec![*output],
            init: Init::Zeros,
            decay: false,
        };
        let biases = if self.bias { self.parts.as_slice() } else { &[] };
        self.parts.iter().map(weight).chain(biases.iter().map(bias)).collect()
    }

    fn forward_flops_per_token(&self, _seq: usize) -> f64 {
        2.0 * self.input as f64 * self.output as f64
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { add: true, carry: true, dx_over_x: true, input_without_x: true, ..Capabilities::default() }
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        let (weight, bias) = self.views(io.weights)?;
        cx.backend.matmul(
            cx.lane,
            Matmul {
                a: io.x,
                b: weight,
                d: io.y,
                m: cx.shape.tokens(),
                n: self.output,
                k: self.input,
                transpose_a: false,
                transpose_b: true,
                bias,
                residual: io.add,
                accumulate: false,
            },
        )
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        // Parameters first: `dx` may be `x`.
        self.backward_params(cx, io.grads, io.x, io.dy)?;
        self.backward_x(cx, io.weights, io.dy, io.dx, io.carry)
    }

    fn deferred(&self, _shape: BatchShape, _dtype: DType) -> Option<Vec<Tensor>> {
        Some(Vec::new())
    }

    fn weights_flops_per_token(&self) -> f64 {
        2.0 * self.input as f64 * self.output as f64
    }

    fn backward_input(&self, cx: &Cx<'_>, io: BackwardIo<'_>, _deferred: &[View]) -> Result<(), DeviceError> {
        self.backward_x(cx, io.weights, io.dy, io.dx, io.carry)
    }

    fn backward_weights(&self, cx: &Cx<'_>, io: WeightsIo<'_>) -> Result<(), DeviceError> {
        self.backward_params(cx, io.grads, io.x, io.dy)
    }
}
