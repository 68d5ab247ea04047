//! The model that is trained: a preset, a folder of weights, or sizes from the configuration file.

use std::fs;
use std::path::{Path, PathBuf};

use gpurun_model::{Dropout, Family, ModelConfig, ModelError, PRESETS};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::error::{OptionsError, Origins, nearest};

const DEFAULT: &str = "tiny";

/// Where a model's sizes and weights come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelChoice {
    /// Sizes of this preset, perhaps changed; weights are made from the seed.
    Preset(String),
    /// Sizes from the configuration file alone; weights are made from the seed.
    Custom,
    /// Sizes and weights from this folder in Hugging Face's layout.
    Folder(PathBuf),
}

/// The model of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelOptions {
    /// Where it comes from.
    pub choice: ModelChoice,
    /// Its sizes.
    pub config: ModelConfig,
}

impl ModelOptions {
    /// The model called `name`, with the changes of the file's `[model]` table.
    pub(crate) fn new(
        name: Option<&str>,
        table: Map<String, Json>,
        dropout: Dropout,
        origins: &Origins,
    ) -> Result<Self, OptionsError> {
        let Some(name) = name else {
            // A table that says what kind of model it is stands for itself.
            let (choice, base) = match table.get("family") {
                Some(_) => (ModelChoice::Custom, Map::new()),
                None => (ModelChoice::Preset(DEFAULT.to_owned()), fields(&preset(DEFAULT, origins)?)),
            };
            return Ok(Self { choice, config: changed(base, table, origins)? });
        };
        if PRESETS.contains(&name) {
            let config = changed(fields(&preset(name, origins)?), table, origins)?;
            return Ok(Self { choice: ModelChoice::Preset(name.to_owned()), config });
        }
        let folder = Path::new(name);
        if !folder.is_dir() {
            return Err(unknown(name, origins));
        }
        if let Some(field) = table.keys().next() {
            let what = format!("the weights in {name} have the sizes that its config.json says");
            return Err(origins.invalid(&format!("model.{field}"), what, "leave this out, or choose a preset"));
        }
        Ok(Self { choice: ModelChoice::Folder(folder.to_owned()), config: read_folder(folder, dropout, origins)? })
    }

    /// A name for people.
    pub(crate) fn describe(&self) -> String {
        match &self.choice {
            ModelChoice::Preset(name) => name.clone(),
            ModelChoice::Custom => "a model from the configuration file".to_owned(),
            ModelChoice::Folder(folder) => folder.display().to_string(),
        }
    }

    /// The `tokenizer.json` of the folder that the weights come from, if there is one.
    pub(crate) fn tokenizer_file(&self) -> Option<PathBuf> {
        match &self.choice {
            ModelChoice::Folder(folder) => Some(folder.join("tokenizer.json")).filter(|file| file.is_file()),
            _ => None,
        }
    }
}

fn model_error(origins: &Origins) -> impl Fn(ModelError) -> OptionsError {
    let at = origins.at("model");
    move |source| OptionsError::Model { at: at.clone(), source }
}

fn preset(name: &str, origins: &Origins) -> Result<ModelConfig, OptionsError> {
    ModelConfig::preset(name).map_err(model_error(origins))
}

fn unknown(name: &str, origins: &Origins) -> OptionsError {
    let what = format!("{name:?} is neither a preset nor a folder");
    let list = PRESETS.join(", ");
    let mend = match nearest(name, PRESETS) {
        Some(near) => format!("did you mean {near}? The presets are {list}"),
        None => format!("the presets are {list}"),
    };
    origins.invalid("model", what, mend)
}

fn read_folder(folder: &Path, dropout: Dropout, origins: &Origins) -> Result<ModelConfig, OptionsError> {
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| {
        let what = format!("cannot read {}: {error}", path.display());
        origins.invalid("model", what, "give a folder with config.json and model.safetensors, or a preset")
    })?;
    ModelConfig::from_hf_config_with(&text, dropout).map_err(|error| {
        let at = format!("{}: {}", origins.at("model"), folder.display());
        let asks_for_dropout =
            dropout == Dropout::Refuse && ModelConfig::from_hf_config_with(&text, Dropout::Ignore).is_ok();
        if asks_for_dropout {
            OptionsError::Invalid { at, what: error.to_string(), mend: "--dropout 0 does so".to_owned() }
        } else {
            OptionsError::Model { at, source: error }
        }
    })
}

/// The fields of a configuration by name.
fn fields(config: &ModelConfig) -> Map<String, Json> {
    match serde_json::to_value(config) {
        Ok(Json::Object(fields)) => fields,
        other => panic!("a model configuration is an object of plain values, not {other:?}"),
    }
}

/// `base` with the changes of `table`. Sizes that follow from a changed one, and are not given, follow it.
fn changed(
    mut base: Map<String, Json>,
    table: Map<String, Json>,
    origins: &Origins,
) -> Result<ModelConfig, OptionsError> {
    check_fields(&table, origins)?;
    let follow = |base: &mut Map<String, Json>, names: &[&str]| names.iter().for_each(|name| drop(base.remove(*name)));
    let given = |name: &str| table.contains_key(name);
    if given("family") && base.get("family") != table.get("family") {
        follow(&mut base, &["kv_heads", "head_dim", "ff", "tied", "eps", "theta", "rope_scaling", "qkv_bias"]);
    }
    if given("width") || given("heads") {
        follow(&mut base, &["head_dim"]);
    }
    if given("heads") && base.get("kv_heads") == base.get("heads") {
        follow(&mut base, &["kv_heads"]);
    }
    let gpt2 = serde_json::to_value(Family::Gpt2).ok();
    if given("width") && base.get("family") == gpt2.as_ref() {
        follow(&mut base, &["ff"]);
    }
    let names: Vec<String> = table.keys().cloned().collect();
    base.extend(table);
    serde_json::from_value(Json::Object(base)).map_err(|error| {
        let said = error.to_string();
        // The message names a field; the line of that one, or of the table, is where to look.
        let field = names.iter().find(|name| said.contains(&format!("configuration: {name} ")));
        let place = |name: &str| origins.0.get(name).cloned();
        let at = field.and_then(|name| place(&format!("model.{name}"))).or_else(|| place("model"));
        OptionsError::FileValue { at: at.unwrap_or_default(), what: said }
    })
}

/// Every field of the table must exist and be of its kind.
fn check_fields(table: &Map<String, Json>, origins: &Origins) -> Result<(), OptionsError> {
    let known = fields(&preset(DEFAULT, origins)?);
    for (name, value) in table {
        let at = origins.0.get(&format!("model.{name}")).cloned().unwrap_or_default();
        let Some(example) = known.get(name) else {
            let key = format!("{name} of [model]");
            return Err(OptionsError::UnknownKey { at, key, nearest: nearest(name, known.keys().map(String::as_str)) });
        };
        let (good, wanted) = match example {
            Json::Bool(_) => (value.is_boolean(), "true or false"),
            Json::String(_) => (value.is_string(), "a string"),
            Json::Number(n) if n.is_u64() => (value.is_u64(), "a whole number"),
            Json::Number(_) => (value.is_number(), "a number"),
            _ => (value.is_object(), "a table"),
        };
        if !good {
            return Err(OptionsError::FileValue { at, what: format!("{name} of [model] is {value}; give {wanted}") });
        }
    }
    Ok(())
}
