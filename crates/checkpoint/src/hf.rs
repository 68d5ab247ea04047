//! Folders of weights in the layout that Hugging Face's libraries use: `config.json` with `model.safetensors`, or several
//! files with `model.safetensors.index.json`.
//!
//! Two views of such a folder: its tensors as they are stored ([`HfWeights::read`]), and the parameters of a model of this
//! project ([`HfWeights::read_param`]). They differ in two ways. Weights that were saved without the head lack the first
//! part of each name (`transformer.`, `model.`). And GPT-2's linear layers are stored `[in, out]` there, `[out, in]` here.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use std::sync::{Mutex, PoisonError};

use gpurun_types::{Bytes, DType};
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::manifest::{Section, TensorShape};
use crate::open::{Checkpoint, nearest};
use crate::save::{sync_folder, write_durable};
use crate::tensors::{Entry, Fill, Outgoing, StreamError, encode_header, open_file, read_header, read_values, stream};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const PARTIAL: &str = ".model.safetensors.partial";

/// Bytes of small writes that are gathered into one.
const BUFFER: usize = 1 << 20;

/// Prefixes that weights saved without the head lack.
const PREFIXES: [&str; 2] = ["transformer.", "model."];

/// GPT-2's linear layers, which are stored `[in, out]`.
const TRANSPOSED: [&str; 3] = [".c_attn.weight", ".c_proj.weight", ".c_fc.weight"];

/// Tensors that are no weights: masks and tables that follow from the sizes, and the head that is tied to the token table.
const NO_WEIGHTS: [&str; 4] = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight"];

fn is_transposed(name: &str) -> bool {
    TRANSPOSED.iter().any(|end| name.ends_with(end))
}

/// The weights of a folder, read with positioned reads and converted to f32.
#[derive(Debug)]
pub struct HfWeights {
    dir: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, (usize, Entry)>,
    /// The last transposed parameter and its values in our order: ranges of one parameter are asked for one after another.
    transposed: Mutex<Option<(String, Vec<f32>)>>,
}

impl HfWeights {
    /// Opens the weights in folder `dir` and checks the header of every file.
    ///
    /// # Errors
    /// No weights there, a damaged file, or a type other than F32, BF16 and F16.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let index = dir.join(INDEX);
        let mut weights =
            Self { dir: dir.to_owned(), files: Vec::new(), tensors: BTreeMap::new(), transposed: Mutex::default() };
        if index.is_file() {
            weights.add_indexed(&index)?;
        } else if dir.join(SINGLE).is_file() {
            let entries = weights.add_file(SINGLE)?;
            weights.tensors.extend(entries.into_iter().map(|e| (e.key.clone(), (0, e))));
        } else {
            return Err(not_weights(dir));
        }
        Ok(weights)
    }

    fn add_file(&mut self, name: &str) -> Result<Vec<Entry>, Error> {
        let path = self.dir.join(name);
        let file = open_file(&path)?;
        let header = read_header(&file, &path)?;
        self.files.push((path, file));
        Ok(header.entries)
    }

    fn add_indexed(&mut self, index: &Path) -> Result<(), Error> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text = fs::read(index).map_err(Error::io("read", index))?;
        let Index { weight_map } =
            serde_json::from_slice(&text).map_err(|e| Error::manifest(index, format!("no index of weights: {e}")))?;
        let mut opened: HashMap<String, (usize, HashMap<String, Entry>)> = HashMap::new();
        for (tensor, name) in weight_map {
            // A name that leads out of the folder must not be followed.
            if Path::new(&name).file_name() != Some(name.as_ref()) {
                return Err(Error::manifest(index, format!("{name:?} is no file name")));
            }
            if !opened.contains_key(&name) {
                let entries = self.add_file(&name)?;
                let entries = entries.into_iter().map(|e| (e.key.clone(), e)).collect();
                opened.insert(name.clone(), (self.files.len() - 1, entries));
            }
            let (file, entries) = &opened[&name];
            let entry = entries.get(&tensor).ok_or_else(|| {
                Error::header(&self.files[*file].0, format!("tensor {tensor} is not there, {INDEX} says so"))
            })?;
            self.tensors.insert(tensor, (*file, entry.clone()));
        }
        Ok(())
    }

    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Names of the tensors, sorted, with shape and stored type.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize], DType)> {
        self.tensors.iter().map(|(name, (_, entry))| (name.as_str(), entry.shape.as_slice(), entry.dtype))
    }

    /// Shape of a tensor, if it is there.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(_, entry)| entry.shape.as_slice())
    }

    /// Reads elements `start..start + out.len()` of a tensor, row-major, as f32.
    ///
    /// # Errors
    /// No such tensor or range, or a file that can no longer be read.
    pub fn read(&self, name: &str, start: u64, out: &mut [f32]) -> Result<(), Error> {
        let (file, entry) = self.tensors.get(name).ok_or_else(|| self.no_tensor(name))?;
        let size = entry.dtype.size() as u64;
        let (elements, end) = (entry.bytes / size, start.saturating_add(out.len() as u64));
        if end > elements {
            return Err(Error::OutOfRange { path: self.dir.clone(), name: name.to_owned(), start, end, elements });
        }
        let (path, file) = &self.files[*file];
        read_values(file, path, entry.offset + start * size, entry.dtype, out)
    }

    /// The name under which the parameter `name` of a model is stored.
    fn stored<'a>(&self, name: &'a str) -> Option<&'a str> {
        let short = PREFIXES.iter().filter_map(|prefix| name.strip_prefix(prefix));
        std::iter::once(name).chain(short).find(|name| self.tensors.contains_key(*name))
    }

    /// Shape of parameter `name` of a model, if it is there.
    #[must_use]
    pub fn param_shape(&self, name: &str) -> Option<Vec<usize>> {
        let mut shape = self.shape(self.stored(name)?)?.to_vec();
        if is_transposed(name) {
            shape.reverse();
        }
        Some(shape)
    }

    /// Checks that the weights are those of a model with exactly these parameters.
    ///
    /// # Errors
    /// A parameter that is missing or has another shape, or weights that the model has no place for.
    pub fn check_params(&self, params: &[TensorShape]) -> Result<(), Error> {
        let wrong = |what| Err(Error::NotWeights { path: self.dir.clone(), what });
        let mut used = std::collections::HashSet::new();
        for TensorShape { name, shape } in params {
            match self.param_shape(name) {
                None => return Err(self.no_tensor(name)),
                Some(found) if found != *shape => {
                    return wrong(format!("{name} has shape {found:?}, the model needs {shape:?}"));
                }
                Some(_) => used.extend(self.stored(name)),
            }
        }
        let unused = self
            .tensors
            .keys()
            .find(|name| !used.contains(name.as_str()) && !NO_WEIGHTS.iter().any(|end| name.ends_with(end)));
        match unused {
            Some(name) => wrong(format!("holds {name}, for which the model of its {CONFIG} has no place")),
            None => Ok(()),
        }
    }

    /// Reads elements `start..start + out.len()` of parameter `name` of a model.
    ///
    /// # Errors
    /// As [`HfWeights::read`].
    pub fn read_param(&self, name: &str, start: u64, out: &mut [f32]) -> Result<(), Error> {
        let stored = self.stored(name).ok_or_else(|| self.no_tensor(name))?;
        let (rows, columns) = match self.shape(stored) {
            Some([rows, columns]) if is_transposed(name) => (*rows, *columns),
            _ => return self.read(stored, start, out),
        };
        let (elements, end) = ((rows * columns) as u64, start.saturating_add(out.len() as u64));
        if end > elements {
            return Err(Error::OutOfRange { path: self.dir.clone(), name: name.to_owned(), start, end, elements });
        }
        let mut cache = self.transposed.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.as_ref().is_none_or(|(cached, _)| cached != stored) {
            let mut values = vec![0.0; rows * columns];
            self.read(stored, 0, &mut values)?;
            *cache = Some((stored.to_owned(), transpose(&values, rows, columns)));
        }
        if let Some((_, values)) = cache.as_ref() {
            out.copy_from_slice(&values[start as usize..end as usize]);
        }
        Ok(())
    }

    fn no_tensor(&self, name: &str) -> Error {
        Error::NoTensor { path: self.dir.clone(), name: name.to_owned(), nearest: nearest(name, self.tensors.keys()) }
    }
}

/// The transpose of a row-major matrix.
fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    /// Side of a tile: two of them fit the first-level cache.
    const TILE: usize = 32;
    let mut out = vec![0.0; values.len()];
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    out[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    out
}

fn not_weights(dir: &Path) -> Error {
    let what = if !dir.is_dir() {
        "is no folder".to_owned()
    } else if dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists() {
        format!("holds weights as a pickle (pytorch_model.bin), which can run code when read; convert them to {SINGLE}")
    } else {
        format!("holds neither {SINGLE} nor {INDEX}")
    };
    Error::NotWeights { path: dir.to_owned(), what }
}

/// The `config.json` of a folder.
///
/// # Errors
/// It is not there, or is no JSON.
pub fn read_config(dir: impl AsRef<Path>) -> Result<Value, Error> {
    let path = dir.as_ref().join(CONFIG);
    let text = fs::read(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => {
            Error::NotWeights { path: dir.as_ref().to_owned(), what: format!("holds no {CONFIG}") }
        }
        _ => Error::io("read", &path)(source),
    })?;
    serde_json::from_slice(&text).map_err(|e| Error::NotWeights { path, what: format!("is no JSON: {e}") })
}

/// A tensor to export.
pub struct ExportTensor<'a> {
    /// Name.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// Delivers the values, a few MiB at a time.
    pub fill: Fill<'a>,
}

/// Writes `config.json` and `model.safetensors` into folder `dir`, which is created if need be, in bounded memory;
/// returns the size of the weights. The weights are written beside and renamed when they are whole.
///
/// `dtype` is `F32`, `Bf16` or `F16`; values are rounded to the nearest, ties to even.
///
/// # Errors
/// A write or a source failed. What had been written of the weights is removed.
///
/// # Panics
/// When two tensors have the same name: a bug of the caller.
pub fn export<'a>(
    dir: impl AsRef<Path>,
    config: &Value,
    dtype: DType,
    tensors: impl IntoIterator<Item = ExportTensor<'a>>,
) -> Result<Bytes, Error> {
    let dir = dir.as_ref();
    fs::create_dir_all(dir).map_err(Error::io("create folder", dir))?;
    let mut outgoing: Vec<Outgoing<'a>> = tensors
        .into_iter()
        .map(|ExportTensor { name, shape, fill }| Outgoing { key: name, shape, dtype, fill })
        .collect();
    let mut names: Vec<&str> = outgoing.iter().map(|t| t.key.as_str()).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|w| w[0] != w[1]), "a tensor is exported twice");
    // Readers refuse a file that does not state for which framework its tensors are laid out.
    let header = encode_header(&outgoing, ("format", "pt".to_owned()));
    let total = Bytes(header.len() as u64 + outgoing.iter().map(Outgoing::bytes).sum::<u64>());
    let partial = dir.join(PARTIAL);
    write_weights(&partial, &header, &mut outgoing).inspect_err(|_| {
        // The first error is the one to report.
        if let Err(second) = fs::remove_file(&partial) {
            tracing::warn!("cannot remove {}: {second}", partial.display());
        }
    })?;
    let json = serde_json::to_string_pretty(config).expect("a JSON value can always be written") + "\n";
    write_durable(&dir.join(CONFIG), json.as_bytes())?;
    let path = dir.join(SINGLE);
    fs::rename(&partial, &path).map_err(Error::io("rename to", &path))?;
    sync_folder(dir)?;
    Ok(total)
}

/// Exports the weights of a checkpoint, as [`export`] does.
///
/// # Errors
/// As [`export`], and a checkpoint that cannot be read.
pub fn export_checkpoint(
    checkpoint: &Checkpoint,
    dir: impl AsRef<Path>,
    config: &Value,
    dtype: DType,
) -> Result<Bytes, Error> {
    let tensors = checkpoint.meta().tensors.iter().map(|TensorShape { name, shape }| {
        let plain = move |start: u64, out: &mut [f32]| Ok(checkpoint.read(name, Section::Weight, start, out)?);
        let (mut shape, mut fill): (_, Fill<'_>) = (shape.clone(), Box::new(plain));
        if let [rows, columns] = shape[..]
            && is_transposed(name)
        {
            shape.reverse();
            let mut values = Vec::new();
            fill = Box::new(move |start, out| {
                if values.is_empty() {
                    let mut ours = vec![0.0; rows * columns];
                    checkpoint.read(name, Section::Weight, 0, &mut ours)?;
                    values = transpose(&ours, rows, columns);
                }
                let (start, end) = (start as usize, start as usize + out.len());
                out.copy_from_slice(&values[start..end]);
                if end == values.len() {
                    values = Vec::new();
                }
                Ok(())
            });
        }
        ExportTensor { name: name.clone(), shape, fill }
    });
    export(dir, config, dtype, tensors)
}

fn write_weights(path: &Path, header: &[u8], outgoing: &mut [Outgoing<'_>]) -> Result<(), Error> {
    let file =
        OpenOptions::new().write(true).create(true).truncate(true).open(path).map_err(Error::io("create", path))?;
    let mut out = BufWriter::with_capacity(BUFFER, file);
    let written = out
        .write_all(header)
        .map_err(StreamError::from)
        .and_then(|()| stream(&mut out, outgoing))
        .and_then(|_| out.flush().map_err(StreamError::from))
        .and_then(|()| out.get_ref().sync_all().map_err(StreamError::from));
    written.map_err(|error| match error {
        StreamError::Write(source) => Error::io("write", path)(source),
        StreamError::Source { key, source } => Error::Source { key, source },
    })
}
