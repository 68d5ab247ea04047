//! One clear line for each mistake: where it is, what is wrong, how to mend it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A mistake in the options of a run.
#[derive(Debug, Error)]
pub enum OptionsError {
    /// The configuration file cannot be read.
    #[error("--config {}: {source}", path.display())]
    ReadConfig {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The configuration file is no TOML.
    #[error("{}:{line}: {what}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What the parser says.
        what: String,
    },
    /// The configuration file has a key that does not exist.
    #[error("{at}: unknown key {key}{}", suggestion(nearest.as_deref()))]
    UnknownKey {
        /// File and line.
        at: String,
        /// The key.
        key: String,
        /// A key that exists and looks like it.
        nearest: Option<String>,
    },
    /// A value in the configuration file cannot be read as what the option takes.
    #[error("{at}: {what}")]
    FileValue {
        /// File and line.
        at: String,
        /// What is wrong.
        what: String,
    },
    /// A value that cannot be, or that does not go with another.
    #[error("{at}: {what}; {mend}")]
    Invalid {
        /// The option, with file and line when it is from there.
        at: String,
        /// What is wrong.
        what: String,
        /// How to mend it.
        mend: String,
    },
    /// The model cannot be built.
    #[error("{at}: {source}")]
    Model {
        /// The option, with file and line when it is from there.
        at: String,
        /// What is wrong.
        source: gpurun_model::ModelError,
    },
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |n| format!("; did you mean {n}?"))
}

/// The candidate most like `name`, when one is much like it.
pub(crate) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let name = name.to_lowercase().replace('_', "-");
    candidates
        .into_iter()
        .map(|c| (strsim::jaro_winkler(&name, &c.to_lowercase().replace('_', "-")), c))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, c)| c.to_owned())
}

/// Where values of the configuration file stand, `FILE:LINE`, by option or by `model.FIELD`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origins(pub BTreeMap<String, String>);

impl Origins {
    /// How an error names option `name`: `--lr`, or `run.toml:3: lr`.
    pub fn at(&self, name: &str) -> String {
        match self.0.get(name) {
            Some(place) => format!("{place}: {name}"),
            None => format!("--{name}"),
        }
    }

    pub fn invalid(&self, name: &str, what: impl Into<String>, mend: impl Into<String>) -> OptionsError {
        OptionsError::Invalid { at: self.at(name), what: what.into(), mend: mend.into() }
    }
}
