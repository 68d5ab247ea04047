//! Llama (Touvron et al. 2023) and its kin (Mistral, Qwen2): rotary positions, RMS norm before each part, grouped heads,
//! SwiGLU, output tied to the token table or not.
//!
//! Parameter names and layouts are those of Hugging Face's `LlamaForCausalLM`. Starting weights are normal with deviation 0.02;
//! those of the projections back to the residual stream are divided by `sqrt(2 * layers)`, as in GPT-2.

use gpurun_device::RopeScaling;

use crate::layers::{
    Activations, AttentionConfig, EmbeddingUnit, LayerUnit, Linear, LossHead, Norm, Projections, Residual, RopeConfig,
    SelfAttention, Sequence, SwiGlu,
};
use crate::{Model, ModelConfig, ModelError, Unit, layers};

/// Deviation of starting weights.
const STD: f32 = 0.02;

pub(crate) fn build(config: &ModelConfig, activations: Activations) -> Result<Model, ModelError> {
    let table = "model.embed_tokens";
    let embedding = EmbeddingUnit::new("embed_tokens", table, config.vocabulary, config.width, STD);
    let mut units: Vec<Box<dyn Unit>> = vec![Box::new(embedding)];
    for layer in 0..config.layers {
        units.push(Box::new(block(config, layer, activations)?));
    }
    let norm = Norm::rms("model.norm", config.width, config.eps);
    units.push(Box::new(if config.tied {
        LossHead::tied("lm_head", norm, &format!("{table}.weight"), config.vocabulary)
    } else {
        LossHead::new("lm_head", norm, "lm_head", config.vocabulary, STD)
    }));
    Model::new(units, config.vocabulary, None)
}

/// Decoder layer `layer`: attention and feed-forward, each with its norm before and a residual around.
fn block(config: &ModelConfig, layer: usize, activations: Activations) -> Result<LayerUnit, ModelError> {
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let (width, ff) = (config.width, config.ff);
    let residual_std = STD / (2.0 * config.layers as f32).sqrt();
    let attention = SelfAttention::new(
        Projections::Separate {
            q: &name("self_attn.q_proj"),
            k: &name("self_attn.k_proj"),
            v: &name("self_attn.v_proj"),
            out: &name("self_attn.o_proj"),
        },
        AttentionConfig {
            width,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.qkv_bias,
            out_bias: false,
            rope: Some(RopeConfig { theta: config.theta, scaling: config.rope_scaling.map(RopeScaling::from) }),
            out_std: residual_std,
        },
    )?;
    let attention = layers![Norm::rms(&name("input_layernorm"), width, config.eps), attention];
    let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
    let mlp = layers![
        Norm::rms(&name("post_attention_layernorm"), width, config.eps),
        Linear::joined(&[(gate.as_str(), ff), (up.as_str(), ff)], width)?.bias(false).std(STD),
        SwiGlu::new(ff),
        Linear::new(&name("mlp.down_proj"), ff, width).bias(false).std(residual_std),
    ];
    let halves = layers![
        Residual::new(Sequence::with(attention, activations)?)?,
        Residual::new(Sequence::with(mlp, activations)?)?,
    ];
    Ok(LayerUnit::new(&format!("layers.{layer}"), Sequence::with(halves, activations)?))
}
