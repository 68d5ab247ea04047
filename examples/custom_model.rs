//! A model of one's own: a unit with its own mathematics, trained by the same `run` as the built-in models.
//!
//! `cargo build --release -p gpurun --example custom_model`, then
//! `gpurun --nproc 2 target/release/examples/custom_model --steps 100`
//!
//! The unit mixes each token with its neighbours by a gelu feed-forward behind a norm; [`ScaledSkip`] is a layer written by
//! hand, forward and backward, to show how little that takes. Sharding, offload, checkpoints and resume need nothing here.

use std::process::ExitCode;

use gpurun::device::DeviceError;
use gpurun::layers;
use gpurun::model::layers::{
    AttentionConfig, BackwardIo, EmbeddingUnit, ForwardIo, Gelu, Layer, LayerUnit, Linear, LossHead, Norm, Projections,
    Residual, SelfAttention, Sequence,
};
use gpurun::model::{Cx, Model, ModelError, Unit};

/// `y = x + x`: doubles the signal. No parameters, nothing to save.
struct ScaledSkip {
    width: usize,
}

impl Layer for ScaledSkip {
    fn describe(&self) -> String {
        "scaled skip".to_owned()
    }

    fn input_width(&self) -> usize {
        self.width
    }

    fn output_width(&self) -> usize {
        self.width
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        cx.backend.copy(cx.lane, io.x, io.y)?;
        cx.backend.add_assign(cx.lane, io.x, io.y)
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        cx.backend.copy(cx.lane, io.dy, io.dx)?;
        cx.backend.add_assign(cx.lane, io.dy, io.dx)
    }
}

fn block(index: usize, width: usize) -> Result<LayerUnit, ModelError> {
    let name = |part: &str| format!("block.{index}.{part}");
    let config = AttentionConfig {
        width,
        heads: 4,
        kv_heads: 2,
        head_dim: width / 4,
        qkv_bias: false,
        out_bias: false,
        rope: None,
        out_std: 0.02,
    };
    let qkv = (name("q"), name("k"), name("v"));
    let projections = Projections::Separate { q: &qkv.0, k: &qkv.1, v: &qkv.2, out: &name("out") };
    let attention = layers![Norm::rms(&name("norm1"), width, 1e-5), SelfAttention::new(projections, config)?];
    let mixer = layers![
        Norm::layer(&name("norm2"), width, 1e-5),
        Linear::new(&name("up"), width, 3 * width),
        Gelu::new(3 * width),
        Linear::new(&name("down"), 3 * width, width).std(0.01),
        ScaledSkip { width },
    ];
    let parts = layers![Residual::new(Sequence::new(attention)?)?, Residual::new(Sequence::new(mixer)?)?];
    Ok(LayerUnit::new(&format!("block.{index}"), Sequence::new(parts)?))
}

fn main() -> ExitCode {
    gpurun::run(|options| {
        let (vocabulary, width) = (257, 96);
        let embedding = EmbeddingUnit::new("embedding", "table", vocabulary, width, 0.02);
        let embedding = embedding.positions("positions", options.seq_len, 0.02);
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(embedding)];
        for index in 0..3 {
            units.push(Box::new(block(index, width)?));
        }
        units.push(Box::new(LossHead::tied("head", Norm::rms("norm", width, 1e-5), "table.weight", vocabulary)));
        Model::new(units, vocabulary, Some(options.seq_len))
    })
}
