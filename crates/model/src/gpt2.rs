//! GPT-2 (Radford et al. 2019): learned positions, layer norm before each part, gelu, output tied to the token table.
//!
//! Parameter names are those of Hugging Face's `GPT2LMHeadModel`. Linear weights are stored `[out, in]`; that library stores
//! GPT-2's the other way round, so an importer transposes them.

use crate::layers::{
    Activations, AttentionConfig, EmbeddingUnit, Gelu, LayerUnit, Linear, LossHead, Norm, Projections, Residual,
    SelfAttention, Sequence,
};
use crate::{Model, ModelConfig, ModelError, Unit, layers};

/// Deviation of starting weights.
const STD: f32 = 0.02;

pub(crate) fn build(config: &ModelConfig, activations: Activations) -> Result<Model, ModelError> {
    let table = "transformer.wte";
    let embedding = EmbeddingUnit::new("wte", table, config.vocabulary, config.width, STD);
    let embedding = embedding.positions("transformer.wpe", config.context, STD);
    let mut units: Vec<Box<dyn Unit>> = vec![Box::new(embedding)];
    for layer in 0..config.layers {
        units.push(Box::new(block(config, layer, activations)?));
    }
    let norm = Norm::layer("transformer.ln_f", config.width, config.eps);
    units.push(Box::new(if config.tied {
        LossHead::tied("lm_head", norm, &format!("{table}.weight"), config.vocabulary)
    } else {
        LossHead::new("lm_head", norm, "lm_head", config.vocabulary, STD)
    }));
    Model::new(units, config.vocabulary, Some(config.context))
}

/// Block `layer`: attention and feed-forward, each with its norm before and a residual around.
fn block(config: &ModelConfig, layer: usize, activations: Activations) -> Result<LayerUnit, ModelError> {
    let name = |part: &str| format!("transformer.h.{layer}.{part}");
    let width = config.width;
    // Each block adds to the residual stream twice, so that its variance stays near one.
    let residual_std = STD / (2.0 * config.layers as f32).sqrt();
    let attention = SelfAttention::new(
        Projections::Packed { qkv: &name("attn.c_attn"), out: &name("attn.c_proj") },
        AttentionConfig {
            width,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            qkv_bias: true,
            out_bias: true,
            rope: None,
            out_std: residual_std,
        },
    )?;
    let attention = layers![Norm::layer(&name("ln_1"), width, config.eps), attention];
    let mlp = layers![
        Norm::layer(&name("ln_2"), width, config.eps),
        Linear::new(&name("mlp.c_fc"), width, config.ff).std(STD),
        Gelu::new(config.ff),
        Linear::new(&name("mlp.c_proj"), config.ff, width).std(residual_std),
    ];
    let halves = layers![
        Residual::new(Sequence::with(attention, activations)?)?,
        Residual::new(Sequence::with(mlp, activations)?)?,
    ];
    Ok(LayerUnit::new(&format!("h.{layer}"), Sequence::with(halves, activations)?))
}
