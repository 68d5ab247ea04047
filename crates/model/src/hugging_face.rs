//! Hugging Face's `config.json`, in and out.

use serde_json::{Map, Value, json};

use crate::config::Partial;
use crate::{Family, ModelConfig, ModelError, RopeScalingConfig};

/// What to do with a configuration that asks for dropout, which this crate's layers do not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropout {
    /// Refuse it.
    Refuse,
    /// Train without.
    Ignore,
}

impl ModelConfig {
    /// Reads a `config.json` of model type gpt2, llama, mistral (without a sliding window) or qwen2; refuses dropout.
    ///
    /// # Errors
    /// [`ModelError::HuggingFace`] names the key that cannot be used and says why.
    pub fn from_hf_config(text: &str) -> Result<Self, ModelError> {
        Self::from_hf_config_with(text, Dropout::Refuse)
    }

    /// As [`ModelConfig::from_hf_config`], with a choice about dropout.
    ///
    /// # Errors
    /// As [`ModelConfig::from_hf_config`].
    pub fn from_hf_config_with(text: &str, dropout: Dropout) -> Result<Self, ModelError> {
        let root: Value = serde_json::from_str(text).map_err(|e| fail("(file)", format!("is no JSON: {e}")))?;
        let root = root.as_object().ok_or_else(|| fail("(file)", "is no JSON object"))?;
        let file = File(root);
        let kind = file.text("model_type")?.ok_or_else(|| fail("model_type", format!("is missing; {KINDS}")))?;
        let partial = match kind {
            "gpt2" => gpt2(&file)?,
            "llama" | "mistral" | "qwen2" => llama(&file, kind)?,
            other => return Err(fail("model_type", format!("{other:?} is none of the models here; {KINDS}"))),
        };
        if dropout == Dropout::Refuse {
            file.refuse_dropout()?;
        }
        Self::try_from(partial)
    }

    /// The `config.json` under which Hugging Face's library loads weights of this model.
    #[must_use]
    pub fn to_hf_config(&self) -> Value {
        match self.family {
            Family::Gpt2 => json!({
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "activation_function": "gelu_new",
                "n_layer": self.layers,
                "n_embd": self.width,
                "n_head": self.heads,
                "n_inner": self.ff,
                "n_positions": self.context,
                "n_ctx": self.context,
                "vocab_size": self.vocabulary,
                "layer_norm_epsilon": decimal(self.eps),
                "tie_word_embeddings": self.tied,
                "attn_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "bos_token_id": null,
                "eos_token_id": null,
            }),
            Family::Llama => self.llama_config(),
        }
    }

    fn llama_config(&self) -> Value {
        let (kind, architecture) =
            if self.qkv_bias { ("qwen2", "Qwen2ForCausalLM") } else { ("llama", "LlamaForCausalLM") };
        let mut config = json!({
            "model_type": kind,
            "architectures": [architecture],
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ff,
            "max_position_embeddings": self.context,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": decimal(self.eps),
            "rope_theta": decimal(self.theta),
            "rope_scaling": null,
            "tie_word_embeddings": self.tied,
            "attention_dropout": 0.0,
            "bos_token_id": null,
            "eos_token_id": null,
        });
        if !self.qkv_bias {
            config["attention_bias"] = json!(false);
            config["mlp_bias"] = json!(false);
        }
        if let Some(s) = self.rope_scaling {
            config["rope_scaling"] = json!({
                "rope_type": "llama3",
                "factor": decimal(s.factor),
                "low_freq_factor": decimal(s.low_freq_factor),
                "high_freq_factor": decimal(s.high_freq_factor),
                "original_max_position_embeddings": s.original_max_position_embeddings,
            });
        }
        config
    }
}

const KINDS: &str = "known are gpt2, llama, mistral and qwen2";

fn fail(field: &str, problem: impl Into<String>) -> ModelError {
    ModelError::HuggingFace { field: field.to_owned(), problem: problem.into() }
}

/// The fp64 that prints as the fp32 does, so that 1e-5 is not written as 9.999999747378752e-6.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().expect("a printed fp32 is a number")
}

fn gpt2(file: &File<'_>) -> Result<Partial, ModelError> {
    let activation = file.text("activation_function")?.unwrap_or("gelu_new");
    if !["gelu_new", "gelu_pytorch_tanh"].contains(&activation) {
        return Err(fail("activation_function", format!("{activation:?} is not the tanh gelu of GPT-2 (gelu_new)")));
    }
    file.only("scale_attn_weights", true)?;
    file.only("scale_attn_by_inverse_layer_idx", false)?;
    file.only("add_cross_attention", false)?;
    Ok(Partial {
        family: Some(Family::Gpt2),
        layers: Some(file.need("n_layer")?),
        width: Some(file.need("n_embd")?),
        heads: Some(file.need("n_head")?),
        ff: file.size("n_inner")?,
        vocabulary: Some(file.need("vocab_size")?),
        context: Some(file.need("n_positions")?),
        tied: Some(file.flag("tie_word_embeddings")?.unwrap_or(true)),
        eps: file.number("layer_norm_epsilon")?,
        ..Partial::default()
    })
}

fn llama(file: &File<'_>, kind: &str) -> Result<Partial, ModelError> {
    let activation = file.text("hidden_act")?.unwrap_or("silu");
    if activation != "silu" {
        return Err(fail(
            "hidden_act",
            format!("{activation:?} is not silu, the only activation of these models here"),
        ));
    }
    file.only("attention_bias", false)?;
    file.only("mlp_bias", false)?;
    let context: usize = file.need("max_position_embeddings")?;
    file.refuse_sliding_window(kind, context)?;
    let (theta, rope_scaling) = file.rope()?;
    Ok(Partial {
        family: Some(Family::Llama),
        layers: Some(file.need("num_hidden_layers")?),
        width: Some(file.need("hidden_size")?),
        heads: Some(file.need("num_attention_heads")?),
        // Absent, Llama has no groups; the others each take a number of their own.
        kv_heads: if kind == "llama" {
            file.size("num_key_value_heads")?
        } else {
            Some(file.need("num_key_value_heads")?)
        },
        head_dim: file.size("head_dim")?,
        ff: Some(file.need("intermediate_size")?),
        vocabulary: Some(file.need("vocab_size")?),
        context: Some(context),
        tied: Some(file.flag("tie_word_embeddings")?.unwrap_or(false)),
        // Absent, that library takes 1e-6.
        eps: Some(file.number("rms_norm_eps")?.unwrap_or(1e-6)),
        theta,
        rope_scaling,
        qkv_bias: Some(kind == "qwen2"),
    })
}

/// Typed access to the keys of an object; null is as absent.
struct File<'a>(&'a Map<String, Value>);

impl<'a> File<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn typed<T>(&self, key: &str, what: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ModelError> {
        let read = |v| read(v).ok_or_else(|| fail(key, format!("{v} is no {what}")));
        self.get(key).map(read).transpose()
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "text", Value::as_str)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn number(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.typed(key, "number", |v| v.as_f64().map(|n| n as f32))
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn need(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| fail(key, "is missing"))
    }

    fn only(&self, key: &str, wanted: bool) -> Result<(), ModelError> {
        match self.flag(key)? {
            Some(value) if value != wanted => {
                Err(fail(key, format!("{value} asks for parts that the model here lacks")))
            }
            _ => Ok(()),
        }
    }

    fn refuse_dropout(&self) -> Result<(), ModelError> {
        for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"] {
            if let Some(p) = self.number(key)?.filter(|p| *p != 0.0) {
                let problem =
                    format!("{p} asks for dropout, which is not done here; set it to 0, or ask to train without");
                return Err(fail(key, problem));
            }
        }
        Ok(())
    }

    /// A window as long as the context never slides.
    fn refuse_sliding_window(&self, kind: &str, context: usize) -> Result<(), ModelError> {
        let used = if kind == "qwen2" { self.flag("use_sliding_window")?.unwrap_or(false) } else { true };
        if let Some(window) = self.size("sliding_window")?.filter(|w| used && *w < context) {
            let problem = format!(
                "{window} is less than max_position_embeddings = {context}, and attention here has no sliding window; set it to \
                 null and max_position_embeddings to {window}"
            );
            return Err(fail("sliding_window", problem));
        }
        let layers = self.get("layer_types").and_then(Value::as_array);
        if used && layers.is_some_and(|types| types.iter().any(|t| t != "full_attention")) {
            return Err(fail("layer_types", "names layers without full attention, which are not here"));
        }
        Ok(())
    }

    /// Base and scaling of rotary positions, from the older keys or from `rope_parameters`.
    fn rope(&self) -> Result<(Option<f32>, Option<RopeScalingConfig>), ModelError> {
        let object = |key| self.typed(key, "object", Value::as_object);
        let (key, scaling) = match object("rope_parameters")? {
            Some(parameters) => ("rope_parameters", Some(parameters)),
            None => ("rope_scaling", object("rope_scaling")?),
        };
        let Some(scaling) = scaling.map(File) else { return Ok((self.number("rope_theta")?, None)) };
        let theta = scaling.number("rope_theta")?.or(self.number("rope_theta")?);
        let kind = scaling.text("rope_type")?.or(scaling.text("type")?).unwrap_or("default");
        let number = |name: &str| scaling.number(name)?.ok_or_else(|| fail(key, format!("{name} is missing")));
        let config = match kind {
            "default" => None,
            "llama3" => Some(RopeScalingConfig {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: scaling.need("original_max_position_embeddings")?,
            }),
            other => return Err(fail(key, format!("type {other:?} is not here; known are default and llama3"))),
        };
        Ok((theta, config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        ModelConfig::from_hf_config(text).unwrap_err().to_string()
    }

    const GPT2: &str = r#"{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": null,
        "vocab_size": 50257, "n_positions": 1024, "layer_norm_epsilon": 1e-05, "resid_pdrop": 0.1}"#;

    /// SmolLM2-135M's, shortened.
    const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "vocab_size": 49152,
        "rms_norm_eps": 1e-05, "rope_theta": 100000, "rope_scaling": null, "tie_word_embeddings": true,
        "attention_bias": false, "hidden_act": "silu"}"#;

    #[test]
    fn published_configurations_are_read() {
        let _limit = testkit::time_limit(10);
        let gpt2 = ModelConfig::from_hf_config_with(GPT2, Dropout::Ignore).unwrap();
        assert_eq!(gpt2, ModelConfig { vocabulary: 50257, ..ModelConfig::preset("gpt2-124m").unwrap() });
        assert_eq!(gpt2.parameters(), 124_439_808);
        let llama = ModelConfig::from_hf_config(LLAMA).unwrap();
        assert_eq!((llama.head_dim, llama.kv_heads, llama.theta, llama.tied), (64, 3, 1e5, true));
        assert_eq!(llama.parameters(), 134_515_008);
    }

    #[test]
    fn what_goes_out_comes_in_again() {
        let _limit = testkit::time_limit(10);
        let scaling = RopeScalingConfig {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let llama = ModelConfig::preset("llama-1b").unwrap();
        let mut configs: Vec<ModelConfig> = crate::PRESETS.iter().map(|p| ModelConfig::preset(p).unwrap()).collect();
        configs.push(ModelConfig { qkv_bias: true, tied: true, eps: 1e-6, ..llama.clone() });
        configs.push(ModelConfig { head_dim: 128, rope_scaling: Some(scaling), theta: 5e5, ..llama });
        for config in configs {
            let text = config.to_hf_config().to_string();
            assert_eq!(ModelConfig::from_hf_config(&text).unwrap(), config, "{text}");
        }
    }

    #[test]
    fn newer_files_keep_rotary_positions_in_an_object() {
        let _limit = testkit::time_limit(10);
        let text = LLAMA.replace(
            r#""rope_theta": 100000, "rope_scaling": null"#,
            r#""rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#,
        );
        let config = ModelConfig::from_hf_config(&text).unwrap();
        assert_eq!((config.theta, config.rope_scaling.unwrap().factor), (5e5, 32.0));
    }

    #[test]
    fn what_a_model_here_lacks_is_refused_by_key() {
        let _limit = testkit::time_limit(10);
        assert!(refused(GPT2).contains("resid_pdrop: 0.1 asks for dropout"));
        let llama = |from: &str, to: &str| {
            assert!(LLAMA.contains(from), "{from}");
            refused(&LLAMA.replace(from, to))
        };
        assert!(llama("\"silu\"", "\"gelu\"").contains("hidden_act"));
        assert!(llama("\"attention_bias\": false", "\"attention_bias\": true").contains("attention_bias"));
        assert!(llama("\"rope_scaling\": null", r#""rope_scaling": {"type": "yarn"}"#).contains("yarn"));
        assert!(llama("\"vocab_size\": 49152,", "").contains("vocab_size: is missing"));
        assert!(llama("49152", "-3").contains("vocab_size: -3 is no whole number"));
        let window = LLAMA
            .replace("\"llama\"", "\"mistral\"")
            .replace("\"hidden_act\"", "\"sliding_window\": 4096, \"hidden_act\"");
        assert!(refused(&window).contains("sliding_window: 4096"));
        let unused = window.replace("mistral", "qwen2");
        assert!(ModelConfig::from_hf_config(&unused).unwrap().qkv_bias);
        assert!(refused("{}").contains("model_type"));
        assert!(refused("[1]").contains("(file)"));
        assert!(refused(r#"{"model_type": "t5"}"#).contains("gpt2, llama, mistral and qwen2"));
    }
}
