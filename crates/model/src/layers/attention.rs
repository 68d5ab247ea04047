use gpurun_device::{Attention, AttentionBackward, AttentionShape, DeviceError, Rope, RopeScaling, ScratchSizes};
use gpurun_types::{DType, View};

use super::scratch::workspace;
use crate::layers::{BackwardIo, Capabilities, ForwardIo, Layer, Linear, WeightsIo};
use crate::views::Split;
use crate::{BatchShape, Cx, ModelError, Param, Tensor};

/// Rotary positions (Su et al. 2021).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f32,
    /// Frequency scaling of Llama 3.1.
    pub scaling: Option<RopeScaling>,
}

/// Names of the projection parameters, without `.weight` and `.bias`.
#[derive(Clone, Copy, Debug)]
pub enum Projections<'a> {
    /// Queries, keys and values are one parameter (GPT-2's `c_attn`).
    Packed {
        /// Of queries, keys and values.
        qkv: &'a str,
        /// Of the output projection.
        out: &'a str,
    },
    /// Each is a parameter of its own (Llama).
    Separate {
        /// Of queries.
        q: &'a str,
        /// Of keys.
        k: &'a str,
        /// Of values.
        v: &'a str,
        /// Of the output projection.
        out: &'a str,
    },
}

/// Sizes and choices of a [`SelfAttention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Elements per token, in and out.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads` (Ainslie et al. 2023).
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// The projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub out_bias: bool,
    /// Rotary positions of queries and keys.
    pub rope: Option<RopeConfig>,
    /// Standard deviation of the output projection's starting weights.
    pub out_std: f32,
}

/// Causal self-attention within documents (Vaswani et al. 2017): projection to queries, keys and values, rotary positions,
/// softmax attention scaled by `head_dim^-1/2`, output projection.
///
/// Saved: `qkv` (rotated), `attention` (output of the softmax attention) and `lse`.
pub struct SelfAttention {
    config: AttentionConfig,
    qkv: Linear,
    out: Linear,
}

impl SelfAttention {
    /// # Errors
    /// When head counts do not divide, the head size is odd under rotary positions, or parameters cannot lie side by side.
    pub fn new(names: Projections<'_>, config: AttentionConfig) -> Result<Self, ModelError> {
        let AttentionConfig { width, heads, kv_heads, head_dim, .. } = config;
        let part = match names {
            Projections::Packed { out, .. } | Projections::Separate { out, .. } => format!("attention {out}"),
        };
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let problem = format!("{kv_heads} key/value heads do not divide {heads} query heads; choose a divisor");
            return Err(ModelError::Parts { part, problem });
        }
        if config.rope.is_some() && !head_dim.is_multiple_of(2) {
            let problem = format!("rotary positions need an even head size, not {head_dim}; choose an even one");
            return Err(ModelError::Parts { part, problem });
        }
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let (qkv, out) = match names {
            Projections::Packed { qkv, out } => (Linear::new(qkv, width, queries + 2 * keys), out),
            Projections::Separate { q, k, v, out } => {
                (Linear::joined(&[(q, queries), (k, keys), (v, keys)], width)?, out)
            }
        };
        let out = Linear::new(out, queries, width).bias(config.out_bias).std(config.out_std);
        Ok(Self { config, qkv: qkv.bias(config.qkv_bias), out })
    }

    fn shape(&self, shape: BatchShape) -> AttentionShape {
        AttentionShape {
            batch: shape.batch,
            seq: shape.seq,
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
        }
    }

    fn rotate(&self, cx: &Cx<'_>, qkv: View, inverse: bool) -> Result<(), DeviceError> {
        let Some(rope) = self.config.rope else { return Ok(()) };
        cx.backend.rope(
            cx.lane,
            Rope {
                x: qkv,
                starts: cx.starts,
                rows: cx.shape.tokens(),
                seq: cx.shape.seq,
                heads: self.config.heads + self.config.kv_heads,
                head_dim: self.config.head_dim,
                stride: self.shape(cx.shape).packed_width(),
                theta: rope.theta,
                scaling: rope.scaling,
                inverse,
            },
        )
    }

    /// The gradient of queries, keys and values before rotation, into `dqkv`.
    fn gradient(&self, cx: &Cx<'_>, io: BackwardIo<'_>, dqkv: View) -> Result<(), DeviceError> {
        let dout = cx.scratch[1];
        self.out.backward_x(cx, &io.weights[self.qkv.param_count()..], io.dy, dout, None)?;
        let forward = self.attention(cx, io.saved);
        cx.backend.attention_backward(cx.lane, AttentionBackward { forward, dout, dqkv })?;
        self.rotate(cx, dqkv, true)
    }

    fn attention(&self, cx: &Cx<'_>, saved: &[View]) -> Attention {
        Attention {
            qkv: saved[0],
            starts: cx.starts,
            out: saved[1],
            lse: saved[2],
            scratch: cx.scratch[0],
            shape: self.shape(cx.shape),
            scale: 1.0 / (self.config.head_dim as f32).sqrt(),
        }
    }
}

impl Layer for SelfAttention {
    fn describe(&self) -> String {
        format!("attention ({}, {})", self.qkv.describe(), self.out.describe())
    }

    fn input_width(&self) -> usize {
        self.config.width
    }

    fn output_width(&self) -> usize {
        self.config.width
    }

    fn params(&self) -> Vec<Param> {
        let mut params = self.qkv.params();
        params.extend(self.out.params());
        params
    }

    fn saved(&self, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        let tokens = shape.tokens();
        vec![
            Tensor { name: "qkv", elements: tokens * self.qkv.output_width(), dtype },
            Tensor { name: "attention", elements: tokens * self.out.input_width(), dtype },
            Tensor { name: "lse", elements: tokens * self.config.heads, dtype: DType::F32 },
        ]
    }

    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        let tokens = shape.tokens();
        vec![
            workspace("attention workspace", sizes.attention_scratch(self.shape(shape), dtype)),
            Tensor { name: "attention gradient", elements: tokens * self.out.input_width(), dtype },
            Tensor { name: "qkv gradient", elements: tokens * self.qkv.output_width(), dtype },
        ]
    }

    fn forward_flops_per_token(&self, seq: usize) -> f64 {
        // Scores and weighted values are 2 * seq * heads * head_dim each; the causal half of both is computed.
        let attention = 2.0 * seq as f64 * (self.config.heads * self.config.head_dim) as f64;
        self.qkv.forward_flops_per_token(seq) + attention + self.out.forward_flops_per_token(seq)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { add: true, carry: true, dx_over_x: true, input_without_x: true, ..Capabilities::default() }
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        let (qkv, attention) = (io.saved[0], io.saved[1]);
        let mut weights = Split::new(io.weights);
        let qkv_weights = weights.take(self.qkv.param_count());
        self.qkv.forward(cx, ForwardIo { weights: qkv_weights, y: qkv, add: None, saved: &[], ..io })?;
        self.rotate(cx, qkv, false)?;
        cx.backend.attention_forward(cx.lane, self.attention(cx, io.saved))?;
        let out_weights = weights.take(self.out.param_count());
        self.out.forward(cx, ForwardIo { weights: out_weights, x: attention, saved: &[], ..io })
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        let dqkv = cx.scratch[2];
        let (qkv_grads, out_grads) = io.grads.split_at(self.qkv.param_count());
        self.out.backward_params(cx, out_grads, io.saved[1], io.dy)?;
        self.gradient(cx, io, dqkv)?;
        // Parameters first: `dx` may be `x`.
        self.qkv.backward_params(cx, qkv_grads, io.x, dqkv)?;
        self.qkv.backward_x(cx, &io.weights[..self.qkv.param_count()], dqkv, io.dx, io.carry)
    }

    fn deferred(&self, shape: BatchShape, dtype: DType) -> Option<Vec<Tensor>> {
        let elements = shape.tokens() * self.qkv.output_width();
        Some(vec![Tensor { name: "qkv gradient", elements, dtype }])
    }

    fn weights_flops_per_token(&self) -> f64 {
        self.qkv.weights_flops_per_token() + self.out.weights_flops_per_token()
    }

    fn backward_input(&self, cx: &Cx<'_>, io: BackwardIo<'_>, deferred: &[View]) -> Result<(), DeviceError> {
        self.gradient(cx, io, deferred[0])?;
        self.qkv.backward_x(cx, &io.weights[..self.qkv.param_count()], deferred[0], io.dx, io.carry)
    }

    fn backward_weights(&self, cx: &Cx<'_>, io: WeightsIo<'_>) -> Result<(), DeviceError> {
        let (qkv_grads, out_grads) = io.grads.split_at(self.qkv.param_count());
        self.out.backward_params(cx, out_grads, io.saved[1], io.dy)?;
        self.qkv.backward_params(cx, qkv_grads, io.x, io.deferred[0])
    }
}
