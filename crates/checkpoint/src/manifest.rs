//! The manifest: all that a checkpoint says of itself, and the check that its pieces make a whole.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use gpurun_types::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::error::{Damage, Error};

/// Name of the manifest in a checkpoint's folder.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Version that is written and read.
pub(crate) const VERSION: u64 = 1;

const FORMAT: &str = "gpurun-checkpoint";

/// Start of the last member of the file: the checksum of all bytes before it. Every version keeps this ending, so that
/// damage and a newer version can be told apart.
const TRAILER: &str = ",\n\"crc32\":\"";
const TRAILER_BYTES: usize = TRAILER.len() + 8 + "\"}\n".len();

/// Kinds of state of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    /// Master weights.
    Weight,
    /// Adam's first moment.
    M,
    /// Adam's second moment.
    V,
}

impl Section {
    /// Every section.
    pub const ALL: [Self; 3] = [Self::Weight, Self::M, Self::V];
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weight => "weight",
            Self::M => "m",
            Self::V => "v",
        })
    }
}

/// A number that comes back with the same bits. In the manifest: its type and bits, `f32:3f800000`.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// An unsigned integer.
    U64(u64),
}

impl PartialEq for Scalar {
    /// Equal bits: a NaN equals itself, and 0 is not -0.
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32(x) => write!(f, "f32:{:08x}", x.to_bits()),
            Self::F64(x) => write!(f, "f64:{:016x}", x.to_bits()),
            Self::U64(x) => write!(f, "u64:{x:016x}"),
        }
    }
}

impl Scalar {
    fn parse(text: &str) -> Option<Self> {
        let (kind, bits) = text.split_once(':')?;
        Some(match kind {
            "f32" => Self::F32(f32::from_bits(u32::from_str_radix(bits, 16).ok()?)),
            "f64" => Self::F64(f64::from_bits(u64::from_str_radix(bits, 16).ok()?)),
            "u64" => Self::U64(u64::from_str_radix(bits, 16).ok()?),
            _ => return None,
        })
    }
}

impl Serialize for Scalar {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no scalar")))
    }
}

/// Name and shape of one tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorShape {
    /// Full name, unique in the model.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
}

impl TensorShape {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |n: u64, &d| n.saturating_mul(d as u64))
    }
}

/// What a checkpoint says besides its tensors' data. `model` and `options` belong to the trainer: they come back as they
/// were given, floats with the same bits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// Optimizer steps done.
    pub step: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Sizes of the model.
    pub model: Value,
    /// Options that a resumed run must share.
    pub options: Value,
    /// Further numbers, such as the loss scale.
    pub scalars: BTreeMap<String, Scalar>,
    /// Every tensor. Each has all of [`Section::ALL`].
    pub tensors: Vec<TensorShape>,
}

/// One file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataFile {
    pub name: String,
    pub bytes: u64,
    pub header_bytes: u64,
    pub header_crc32: u32,
}

/// A run of elements of one tensor in one section, and where it lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// Index into [`Meta::tensors`].
    pub tensor: usize,
    pub section: Section,
    /// First element.
    pub start: u64,
    /// Elements.
    pub len: u64,
    pub dtype: DType,
    /// Index into [`Manifest::files`].
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    pub crc32: u32,
}

impl Piece {
    pub fn bytes(&self) -> u64 {
        self.len.saturating_mul(self.dtype.size() as u64)
    }

    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

/// Name of a piece in its file.
pub(crate) fn piece_key(section: Section, tensor: &str, start: u64) -> String {
    format!("{section}/{tensor}@{start}")
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: String,
    version: u64,
    #[serde(flatten)]
    pub meta: Meta,
    /// Ranks that wrote it.
    pub world: u32,
    pub files: Vec<DataFile>,
    pub pieces: Vec<Piece>,
}

impl Manifest {
    pub fn new(meta: Meta, world: u32, files: Vec<DataFile>, pieces: Vec<Piece>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, meta, world, files, pieces }
    }

    /// The manifest as the bytes of its file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("names, numbers and JSON values can always be written");
        assert_eq!(bytes.pop(), Some(b'}'), "a manifest is a JSON object");
        let crc = crc32fast::hash(&bytes);
        bytes.extend_from_slice(format!("{TRAILER}{crc:08x}\"}}\n").as_bytes());
        bytes
    }

    /// Reads and checks a manifest.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::damaged(path, Damage::Missing),
            _ => Error::io("read", path)(source),
        })?;
        Self::from_bytes(&bytes, path)
    }

    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let body = bytes.len().checked_sub(TRAILER_BYTES).map(|end| &bytes[..end]);
        let trailer = |body: &[u8]| format!("{TRAILER}{:08x}\"}}\n", crc32fast::hash(body));
        if body.is_none_or(|body| bytes[body.len()..] != *trailer(body).as_bytes()) {
            return Err(Error::damaged(path, Damage::ManifestChecksum));
        }
        let head: Head = serde_json::from_slice(bytes).map_err(|e| Error::manifest(path, e.to_string()))?;
        if head.format != FORMAT {
            return Err(Error::manifest(path, format!("its format is {:?}, not {FORMAT}", head.format)));
        }
        if head.version != VERSION {
            return Err(Error::UnknownVersion { path: path.to_owned(), found: head.version, supported: VERSION });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| Error::manifest(path, e.to_string()))?;
        manifest.check().map_err(|what| Error::manifest(path, what))?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        for file in &self.files {
            // A name that leads out of the folder must not be followed.
            if Path::new(&file.name).file_name() != Some(file.name.as_ref()) {
                return Err(format!("{:?} is no file name", file.name));
            }
        }
        if let Some(piece) = self.pieces.iter().find(|p| p.file >= self.files.len()) {
            return Err(format!("a piece lies in file {}, there are {}", piece.file, self.files.len()));
        }
        PieceIndex::new(&self.meta.tensors, &self.pieces).map(drop)
    }
}

/// Pieces by tensor and section, in the order of their elements.
#[derive(Debug)]
pub(crate) struct PieceIndex {
    /// Indices of pieces, by `tensor * 3 + section`.
    by_state: Vec<Vec<usize>>,
}

impl PieceIndex {
    /// Sorts the pieces; fails when they do not cover every element of every tensor in every section exactly once.
    pub fn new(tensors: &[TensorShape], pieces: &[Piece]) -> Result<Self, String> {
        let mut by_state = vec![Vec::new(); tensors.len() * Section::ALL.len()];
        for (i, piece) in pieces.iter().enumerate() {
            if piece.tensor >= tensors.len() {
                return Err(format!("a piece belongs to tensor {}, there are {}", piece.tensor, tensors.len()));
            }
            by_state[Self::state(piece.tensor, piece.section)].push(i);
        }
        for (t, tensor) in tensors.iter().enumerate() {
            for section in Section::ALL {
                let list = &mut by_state[Self::state(t, section)];
                list.sort_by_key(|&i| pieces[i].start);
                check_cover(tensor, section, list.iter().map(|&i| &pieces[i]))?;
            }
        }
        Ok(Self { by_state })
    }

    const fn state(tensor: usize, section: Section) -> usize {
        tensor * Section::ALL.len() + section as usize
    }

    /// The pieces of one tensor in one section, as indices, in the order of their elements.
    pub fn pieces(&self, tensor: usize, section: Section) -> &[usize] {
        &self.by_state[Self::state(tensor, section)]
    }
}

fn check_cover<'a>(
    tensor: &TensorShape,
    section: Section,
    pieces: impl Iterator<Item = &'a Piece>,
) -> Result<(), String> {
    let state = format!("{section} of {}", tensor.name);
    let mut covered = 0;
    for piece in pieces {
        match piece.start.cmp(&covered) {
            std::cmp::Ordering::Less => return Err(format!("element {} of {state} is there twice", piece.start)),
            std::cmp::Ordering::Greater => return Err(format!("element {covered} of {state} is missing")),
            std::cmp::Ordering::Equal => covered = piece.end(),
        }
    }
    match covered.cmp(&tensor.elements()) {
        std::cmp::Ordering::Less => Err(format!("element {covered} of {state} is missing")),
        std::cmp::Ordering::Greater => {
            Err(format!("{state} has pieces up to element {covered} of {}", tensor.elements()))
        }
        std::cmp::Ordering::Equal => Ok(()),
    }
}
