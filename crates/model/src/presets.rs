use crate::config::Partial;
use crate::{Family, ModelConfig, ModelError};

/// Names of the presets.
pub const NAMES: [&str; 7] = ["tiny", "gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m", "llama-1b", "llama-7b"];

/// The preset of this name.
pub(crate) fn find(name: &str) -> Result<ModelConfig, ModelError> {
    let partial = match name {
        // Bytes and an end-of-text token.
        "tiny" => Partial { vocabulary: Some(257), context: Some(256), ..gpt2(4, 128, 4) },
        "gpt2-124m" => gpt2(12, 768, 12),
        "gpt2-355m" => gpt2(24, 1024, 16),
        "gpt2-774m" => gpt2(36, 1280, 20),
        "gpt2-1558m" => gpt2(48, 1600, 25),
        "llama-1b" => Partial { kv_heads: Some(8), ..llama(16, 2048, 32, 8192, 2048) },
        "llama-7b" => llama(32, 4096, 32, 11008, 4096),
        _ => return Err(unknown(name)),
    };
    ModelConfig::try_from(partial)
}

/// GPT-2 with the vocabulary of its tokenizer padded from 50257 to a multiple of 128.
fn gpt2(layers: usize, width: usize, heads: usize) -> Partial {
    Partial {
        family: Some(Family::Gpt2),
        layers: Some(layers),
        width: Some(width),
        heads: Some(heads),
        vocabulary: Some(50304),
        context: Some(1024),
        ..Partial::default()
    }
}

fn llama(layers: usize, width: usize, heads: usize, ff: usize, context: usize) -> Partial {
    Partial {
        family: Some(Family::Llama),
        layers: Some(layers),
        width: Some(width),
        heads: Some(heads),
        ff: Some(ff),
        vocabulary: Some(32000),
        context: Some(context),
        ..Partial::default()
    }
}

fn unknown(name: &str) -> ModelError {
    let similarity = |preset: &str| strsim::jaro_winkler(&name.to_lowercase(), preset);
    let nearest = NAMES
        .into_iter()
        .map(|preset| (similarity(preset), preset))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, preset)| preset);
    ModelError::Preset { name: name.to_owned(), nearest, presets: NAMES.join(", ") }
}
