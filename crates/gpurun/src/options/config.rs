//! The configuration file: the options of the command line, under the same names, read by the same parsers.

use std::fs;
use std::path::Path;

use clap::{Args, Command, FromArgMatches};
use serde_json::{Map, Value as Json};
use toml::de::DeTable;
use toml::{Table, Value};

use super::args::{TrainArgs, one_line};
use super::error::{OptionsError, Origins, nearest};

/// The key that may also be a table.
const MODEL: &str = "model";

/// Key in the model table that says what the table changes.
const PRESET: &str = "preset";

/// What a file says.
#[derive(Debug, Default)]
pub(crate) struct FileOptions {
    pub args: TrainArgs,
    /// The `[model]` table without its preset.
    pub model: Map<String, Json>,
    pub origins: Origins,
}

/// Reads a configuration file.
pub(crate) fn read(path: &Path) -> Result<FileOptions, OptionsError> {
    let text = fs::read_to_string(path).map_err(|source| OptionsError::ReadConfig { path: path.to_owned(), source })?;
    parse(&text, path)
}

pub(crate) fn parse(text: &str, path: &Path) -> Result<FileOptions, OptionsError> {
    let syntax = |error: toml::de::Error| OptionsError::Syntax {
        path: path.to_owned(),
        line: error.span().map_or(1, |span| line_of(text, span.start)),
        what: error.message().lines().collect::<Vec<_>>().join(", "),
    };
    let places = DeTable::parse(text).map_err(syntax)?;
    let table: Table = toml::from_str(text).map_err(syntax)?;
    let command = TrainArgs::augment_args(Command::new("config").no_binary_name(true));
    let names: Vec<&str> = command.get_arguments().filter_map(|a| a.get_long()).filter(|n| *n != "config").collect();

    let mut origins = Origins::default();
    for (key, value) in places.get_ref() {
        let place = format!("{}:{}", path.display(), line_of(text, key.span().start));
        if !names.contains(&key.get_ref().as_ref()) {
            return Err(unknown(&place, key.get_ref(), &names));
        }
        origins.0.insert(key.get_ref().to_string(), place);
        if let Some(table) = value.get_ref().as_table() {
            for (field, _) in table {
                let place = format!("{}:{}", path.display(), line_of(text, field.span().start));
                origins.0.insert(format!("{key}.{field}", key = key.get_ref(), field = field.get_ref()), place);
            }
        }
    }
    let mut options = FileOptions { origins, ..FileOptions::default() };
    let mut words = Vec::new();
    for (key, value) in table {
        match value {
            Value::Table(model) if key == MODEL => words.extend(options.take_model(model)?),
            value => words.extend(options.words(&command, &key, value)?),
        }
    }
    // Each value was parsed alone, so that an error could name its line; together they cannot fail.
    let matches = command.try_get_matches_from(words).map_err(|e| options.wrong(MODEL, one_line(&e)))?;
    options.args = TrainArgs::from_arg_matches(&matches).map_err(|e| options.wrong(MODEL, one_line(&e)))?;
    Ok(options)
}

impl FileOptions {
    fn wrong(&self, key: &str, what: impl Into<String>) -> OptionsError {
        let at = self.origins.0.get(key).cloned().unwrap_or_default();
        OptionsError::FileValue { at, what: what.into() }
    }

    /// A key and its value as words of a command line, checked by the parser of the option.
    fn words(&self, command: &Command, key: &str, value: Value) -> Result<Vec<String>, OptionsError> {
        let list = command
            .get_arguments()
            .any(|a| a.get_long() == Some(key) && matches!(a.get_action(), clap::ArgAction::Append));
        let values = match value {
            Value::Array(values) if list => values,
            Value::Array(_) => return Err(self.wrong(key, format!("{key} takes one value, not a list"))),
            value => vec![value],
        };
        let switch = command
            .get_arguments()
            .any(|a| a.get_long() == Some(key) && a.get_possible_values().iter().any(|v| v.matches("true", false)));
        let mut words = Vec::new();
        for value in values {
            let yes_or_no = value.as_bool().filter(|_| switch).map(|yes| yes.to_string());
            let text = yes_or_no
                .or_else(|| scalar(&value))
                .ok_or_else(|| self.wrong(key, format!("{key} takes a number or a string, not {}", kind(&value))))?;
            words.push(format!("--{key}={text}"));
        }
        command.clone().try_get_matches_from(&words).map_err(|e| self.wrong(key, one_line(&e)))?;
        Ok(words)
    }

    /// Keeps the model table; its preset becomes the option `model`.
    fn take_model(&mut self, mut table: Table) -> Result<Option<String>, OptionsError> {
        let preset = match table.remove(PRESET) {
            None => None,
            Some(Value::String(name)) if !name.is_empty() => Some(format!("--{MODEL}={name}")),
            Some(other) => {
                let what = format!("{PRESET} takes the name of a preset or a folder, not {}", kind(&other));
                return Err(self.wrong(&format!("{MODEL}.{PRESET}"), what));
            }
        };
        for (field, value) in table {
            let value = json(&value).map_err(|what| self.wrong(&format!("{MODEL}.{field}"), what))?;
            self.model.insert(field, value);
        }
        Ok(preset)
    }
}

fn unknown(place: &str, key: &str, names: &[&str]) -> OptionsError {
    OptionsError::UnknownKey { at: place.to_owned(), key: key.to_owned(), nearest: nearest(key, names.iter().copied()) }
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(n) => Some(n.to_string()),
        // With its point, so that 3.0 is no whole number here either.
        Value::Float(x) => Some(format!("{x:?}")),
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "an empty string",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

fn json(value: &Value) -> Result<Json, String> {
    match value {
        Value::Float(x) if !x.is_finite() => Err(format!("{x} is no number")),
        Value::Datetime(_) => Err("a date is no size of a model".to_owned()),
        value => serde_json::to_value(value).map_err(|e| e.to_string()),
    }
}

fn line_of(text: &str, byte: usize) -> usize {
    text.as_bytes()[..byte.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1
}
