use std::fmt;

/// What is wrong with a model's description. Every message names the field or part, and says how to mend it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A field of a [`crate::ModelConfig`] holds a value that no model can have.
    #[error("model configuration: {field} = {value} {problem}; {mend}")]
    Field {
        /// The field, as the configuration spells it.
        field: &'static str,
        /// What it holds.
        value: String,
        /// Why that cannot be.
        problem: String,
        /// What to do.
        mend: String,
    },
    /// A field that has no default is absent.
    #[error("model configuration: {field} is missing; give it, or start from a preset ({presets})")]
    Absent {
        /// The field.
        field: &'static str,
        /// The presets there are.
        presets: String,
    },
    /// There is no such preset.
    #[error("unknown model preset {name:?}{}; the presets are {presets}", Suggestion(.nearest))]
    Preset {
        /// What was asked for.
        name: String,
        /// The most similar preset, if any is similar.
        nearest: Option<&'static str>,
        /// The presets there are.
        presets: String,
    },
    /// A Hugging Face `config.json` that cannot be read, or describes a model that this crate does not have.
    #[error("config.json: {field}: {problem}")]
    HuggingFace {
        /// Key in the file, or `(file)` for the file as a whole.
        field: String,
        /// What is wrong, and how to mend it where it can be.
        problem: String,
    },
    /// Layers or units that do not fit together: a mistake in the code that puts a model together.
    #[error("{part}: {problem}")]
    Parts {
        /// The sequence, layer, unit or model.
        part: String,
        /// What does not fit.
        problem: String,
    },
}

struct Suggestion<'a>(&'a Option<&'static str>);

impl fmt::Display for Suggestion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, " (did you mean {name:?}?)"),
            None => Ok(()),
        }
    }
}
