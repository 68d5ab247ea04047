//! Folders of weights in the layout that Hugging Face's libraries use: `config.json` with `model.safetensors`, or several
//! files with `model.safetensors.index.json`.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use gpurun_types::{Bytes, DType};
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::open::nearest;
use crate::save::{sync_folder, write_durable};
use crate::tensors::{Entry, Fill, Outgoing, StreamError, encode_header, open_file, read_header, read_values, stream};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const PARTIAL: &str = ".model.safetensors.partial";

/// Bytes of small writes that are gathered into one.
const BUFFER: usize = 1 << 20;

/// The weights of a folder, read with positioned reads and converted to f32.
#[derive(Debug)]
pub struct HfWeights {
    dir: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, (usize, Entry)>,
}

impl HfWeights {
    /// Opens the weights in folder `dir` and checks the header of every file.
    ///
    /// # Errors
    /// No weights there, a damaged file, or a type other than F32, BF16 and F16.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let index = dir.join(INDEX);
        let mut weights = Self { dir: dir.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
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
        let (file, entry) = self.tensors.get(name).ok_or_else(|| Error::NoTensor {
            path: self.dir.clone(),
            name: name.to_owned(),
            nearest: nearest(name, self.tensors.keys()),
        })?;
        let size = entry.dtype.size() as u64;
        let (elements, end) = (entry.bytes / size, start.saturating_add(out.len() as u64));
        if end > elements {
            return Err(Error::OutOfRange { path: self.dir.clone(), name: name.to_owned(), start, end, elements });
        }
        let (path, file) = &self.files[*file];
        read_values(file, path, entry.offset + start * size, entry.dtype, out)
    }
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
