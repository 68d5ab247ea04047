//! What a model is, as a user writes it.

use gpurun_device::RopeScaling;
use serde::{Deserialize, Serialize};

use crate::layers::Activations;
use crate::{Model, ModelError, gpt2, llama, presets};

/// Kind of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Learned positions, layer norm, gelu.
    Gpt2,
    /// Rotary positions, RMS norm, grouped heads, SwiGLU.
    Llama,
}

/// Frequency scaling of Llama 3.1's rotary positions; the fields are those of Hugging Face's `rope_scaling`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScalingConfig {
    /// Divides the low frequencies.
    pub factor: f32,
    /// Wavelengths longer than `original_max_position_embeddings / low_freq_factor` are fully scaled.
    pub low_freq_factor: f32,
    /// Wavelengths shorter than `original_max_position_embeddings / high_freq_factor` are kept.
    pub high_freq_factor: f32,
    /// Context length of the original training.
    pub original_max_position_embeddings: usize,
}

impl From<RopeScalingConfig> for RopeScaling {
    fn from(c: RopeScalingConfig) -> Self {
        Self {
            factor: c.factor,
            low_frequency: c.low_freq_factor,
            high_frequency: c.high_freq_factor,
            original_context: c.original_max_position_embeddings as f32,
        }
    }
}

/// Sizes and choices of a GPT-2 or Llama model.
///
/// Reading one (TOML, JSON) fills absent fields with the family's usual values, refuses unknown ones, and validates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Partial")]
pub struct ModelConfig {
    /// Kind of model.
    pub family: Family,
    /// Number of blocks.
    pub layers: usize,
    /// Elements of the residual stream per token.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. GPT-2: equal to `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Inner width of the feed-forward part.
    pub ff: usize,
    /// Rows of the token table; token ids are below.
    pub vocabulary: usize,
    /// Longest sequence: rows of GPT-2's position table; for Llama the length that it was made for.
    pub context: usize,
    /// The output matrix is the token table.
    pub tied: bool,
    /// Added to the variance or mean square in norms.
    pub eps: f32,
    /// Base of the rotary frequencies (Llama).
    pub theta: f32,
    /// Frequency scaling of rotary positions (Llama).
    pub rope_scaling: Option<RopeScalingConfig>,
    /// Projections of queries, keys and values have biases (GPT-2 always; Qwen2).
    pub qkv_bias: bool,
}

/// A configuration as written: everything but the sizes may be absent.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Partial {
    pub family: Option<Family>,
    pub layers: Option<usize>,
    pub width: Option<usize>,
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub ff: Option<usize>,
    pub vocabulary: Option<usize>,
    pub context: Option<usize>,
    pub tied: Option<bool>,
    pub eps: Option<f32>,
    pub theta: Option<f32>,
    pub rope_scaling: Option<RopeScalingConfig>,
    pub qkv_bias: Option<bool>,
}

impl TryFrom<Partial> for ModelConfig {
    type Error = ModelError;

    fn try_from(p: Partial) -> Result<Self, ModelError> {
        fn given<T>(field: &'static str, value: Option<T>) -> Result<T, ModelError> {
            value.ok_or_else(|| ModelError::Absent { field, presets: presets::NAMES.join(", ") })
        }
        let family = given("family", p.family)?;
        let (width, heads) = (given("width", p.width)?, given("heads", p.heads)?);
        if p.head_dim.is_none() && (heads == 0 || !width.is_multiple_of(heads)) {
            return Err(ModelError::Field {
                field: "heads",
                value: heads.to_string(),
                problem: format!("does not divide width = {width}"),
                mend: "choose heads that divide width, or give head_dim".to_owned(),
            });
        }
        let gpt2 = family == Family::Gpt2;
        let config = Self {
            family,
            layers: given("layers", p.layers)?,
            width,
            heads,
            kv_heads: p.kv_heads.unwrap_or(heads),
            head_dim: p.head_dim.unwrap_or_else(|| width / heads),
            ff: match p.ff {
                None if gpt2 => 4 * width,
                ff => given("ff", ff)?,
            },
            vocabulary: given("vocabulary", p.vocabulary)?,
            context: given("context", p.context)?,
            tied: p.tied.unwrap_or(gpt2),
            eps: p.eps.unwrap_or(1e-5),
            theta: p.theta.unwrap_or(10_000.0),
            rope_scaling: p.rope_scaling,
            qkv_bias: p.qkv_bias.unwrap_or(gpt2),
        };
        config.validate()?;
        Ok(config)
    }
}

impl ModelConfig {
    /// A preset by name; [`crate::PRESETS`] lists them.
    ///
    /// # Errors
    /// [`ModelError::Preset`] with the nearest name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        presets::find(name)
    }

    /// Checks that a model of these sizes can be built.
    ///
    /// # Errors
    /// [`ModelError::Field`]: the first field that is wrong, and how to mend it.
    pub fn validate(&self) -> Result<(), ModelError> {
        self.validate_sizes()?;
        self.validate_numbers()?;
        match self.family {
            Family::Gpt2 => self.validate_gpt2(),
            Family::Llama => self.validate_llama(),
        }
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        let positive = [
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ff", self.ff),
            ("vocabulary", self.vocabulary),
            ("context", self.context),
        ];
        for (field, value) in positive {
            // Token ids and row counts are i32 on devices.
            if value == 0 || value > i32::MAX as usize {
                return Err(bad(field, value, "is out of range", "choose a value from 1 to 2147483647"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let problem = format!("does not divide heads = {}", self.heads);
            return Err(bad("kv_heads", self.kv_heads, &problem, "choose a divisor of heads"));
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), ModelError> {
        if !(self.eps.is_finite() && self.eps > 0.0) {
            return Err(bad("eps", self.eps, "is no positive number", "1e-5 is usual"));
        }
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return Err(bad("theta", self.theta, "is no number above 1", "10000 is usual, 500000 for long contexts"));
        }
        if let Some(s) = self.rope_scaling {
            let positive = s.factor >= 1.0 && s.low_freq_factor > 0.0 && s.high_freq_factor > s.low_freq_factor;
            if !positive || !s.factor.is_finite() || s.original_max_position_embeddings == 0 {
                return Err(bad(
                    "rope_scaling",
                    format!("{s:?}"),
                    "is no scaling",
                    "factor must be at least 1, 0 < low_freq_factor < high_freq_factor, and \
                     original_max_position_embeddings above 0",
                ));
            }
        }
        Ok(())
    }

    fn validate_gpt2(&self) -> Result<(), ModelError> {
        if self.kv_heads != self.heads {
            let problem = format!("differs from heads = {}", self.heads);
            return Err(bad(
                "kv_heads",
                self.kv_heads,
                &problem,
                "GPT-2 has no grouped heads: leave it out, or use family llama",
            ));
        }
        if self.head_dim * self.heads != self.width {
            let problem = format!("times heads = {} is not width = {}", self.heads, self.width);
            return Err(bad(
                "head_dim",
                self.head_dim,
                &problem,
                "choose heads that divide width, and leave head_dim out",
            ));
        }
        if !self.qkv_bias {
            return Err(bad("qkv_bias", false, "is not GPT-2", "leave it out, or use family llama"));
        }
        if self.rope_scaling.is_some() {
            return Err(bad("rope_scaling", "given", "has no meaning for GPT-2", "leave it out, or use family llama"));
        }
        Ok(())
    }

    fn validate_llama(&self) -> Result<(), ModelError> {
        let even = "rotary positions and joined projections need a multiple of 8: choose other heads, or give head_dim";
        if !(self.head_dim * self.kv_heads).is_multiple_of(8) {
            let problem = format!("times kv_heads = {} is no multiple of 8", self.kv_heads);
            return Err(bad("head_dim", self.head_dim, &problem, even));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(bad("head_dim", self.head_dim, "is odd", even));
        }
        if !self.ff.is_multiple_of(8) {
            return Err(bad("ff", self.ff, "is no multiple of 8", "round it up to one"));
        }
        Ok(())
    }

    /// The model, keeping the fewest activations.
    ///
    /// # Errors
    /// As [`ModelConfig::validate`].
    pub fn build(&self) -> Result<Model, ModelError> {
        self.build_with(Activations::Lean)
    }

    /// The model, with a choice of what its blocks keep for the backward.
    ///
    /// # Errors
    /// As [`ModelConfig::validate`].
    pub fn build_with(&self, activations: Activations) -> Result<Model, ModelError> {
        self.validate()?;
        match self.family {
            Family::Gpt2 => gpt2::build(self, activations),
            Family::Llama => llama::build(self, activations),
        }
    }

    /// Number of parameters; a tied matrix counts once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let c = Counts::of(self);
        let norm = c.width * if self.family == Family::Gpt2 { 2 } else { 1 };
        let biases = match self.family {
            Family::Gpt2 => c.qkv + c.width + c.ff + c.width,
            Family::Llama if self.qkv_bias => c.qkv,
            Family::Llama => 0,
        };
        let positions = if self.family == Family::Gpt2 { self.context as u64 * c.width } else { 0 };
        let tables = if self.tied { c.table } else { 2 * c.table };
        self.layers as u64 * (c.block_matrices + biases + 2 * norm) + norm + tables + positions
    }

    /// Floating-point operations of forward and backward for one token in a sequence of `seq`: `6 N + 6 L C T`, `N` the
    /// elements of all matrices that are multiplied (the output matrix included, tables that are only looked up not), `L`
    /// layers, `C` width of all query heads, `T` tokens of the sequence, causal attention counted half.
    #[must_use]
    pub fn training_flops_per_token(&self, seq: usize) -> f64 {
        let c = Counts::of(self);
        let matrices = (self.layers as u64 * c.block_matrices + c.table) as f64;
        6.0 * matrices + 6.0 * self.layers as f64 * (self.heads * self.head_dim) as f64 * seq as f64
    }
}

/// Elements of the parts of a model.
struct Counts {
    width: u64,
    ff: u64,
    /// Outputs of the query, key and value projections.
    qkv: u64,
    /// The matrices of one block.
    block_matrices: u64,
    /// The token table.
    table: u64,
}

impl Counts {
    fn of(config: &ModelConfig) -> Self {
        let (width, ff) = (config.width as u64, config.ff as u64);
        let queries = (config.heads * config.head_dim) as u64;
        let qkv = queries + 2 * (config.kv_heads * config.head_dim) as u64;
        let mlp = if config.family == Family::Gpt2 { 2 } else { 3 };
        let block_matrices = width * (qkv + queries + mlp * ff);
        Self { width, ff, qkv, block_matrices, table: config.vocabulary as u64 * width }
    }
}

fn bad(field: &'static str, value: impl ToString, problem: &str, mend: &str) -> ModelError {
    ModelError::Field { field, value: value.to_string(), problem: problem.to_owned(), mend: mend.to_owned() }
}

/// The model of a configuration, keeping the fewest activations.
///
/// # Errors
/// As [`ModelConfig::validate`].
pub fn build(config: &ModelConfig) -> Result<Model, ModelError> {
    config.build()
}
