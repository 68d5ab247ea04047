//! Safetensors files as streams: the header first, then the data in bounded memory; and back with positioned reads.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use gpurun_types::DType;
use half::slice::HalfFloatSliceExt;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{Damage, Error, SourceError};

/// Elements that are converted and written, or read, at a time.
pub(crate) const CHUNK: usize = 1 << 20;

/// Longest header that readers of the format accept.
const MAX_HEADER: u64 = 100_000_000;

/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

/// Delivers elements `start..start + out.len()` of a piece into `out`. Called with rising `start`, without gaps.
pub type Fill<'a> = Box<dyn FnMut(u64, &mut [f32]) -> Result<(), SourceError> + 'a>;

/// One tensor to be written to a file.
pub(crate) struct Outgoing<'a> {
    pub key: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub fill: Fill<'a>,
}

impl Outgoing<'_> {
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }

    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size() as u64
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub key: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// In the order of their data.
    pub entries: Vec<Entry>,
    /// Bytes of the header with its length: where the data starts.
    pub bytes: u64,
    pub crc32: u32,
}

/// The bytes of the header of a file that holds `tensors` in this order.
pub(crate) fn encode_header(tensors: &[Outgoing<'_>], note: (&str, String)) -> Vec<u8> {
    let mut begin = 0;
    let infos = tensors.iter().map(|t| {
        let end = begin + t.bytes() as usize;
        let info = TensorInfo { dtype: to_safetensors(t.dtype), shape: t.shape.clone(), data_offsets: (begin, end) };
        begin = end;
        (t.key.clone(), info)
    });
    // One entry only: more would come in a random order, and files would differ from run to run.
    let note = HashMap::from([(note.0.to_owned(), note.1)]);
    let metadata = Metadata::new(Some(note), infos.collect()).expect("offsets follow one another and match the shapes");
    let mut json = serde_json::to_vec(&metadata).expect("a header of names and numbers can always be written");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    header
}

fn to_safetensors(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::I32 | DType::F64 => panic!("weights and moments are never stored as {dtype}"),
    }
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Why a stream stopped.
pub(crate) enum StreamError {
    Write(io::Error),
    Source { key: String, source: SourceError },
}

impl From<io::Error> for StreamError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// Writes the data of `tensors` in order; returns the checksum of each.
pub(crate) fn stream(out: &mut impl Write, tensors: &mut [Outgoing<'_>]) -> Result<Vec<u32>, StreamError> {
    let mut values = Vec::new();
    let mut bytes = Vec::new();
    tensors.iter_mut().map(|tensor| stream_one(out, tensor, &mut values, &mut bytes)).collect()
}

fn stream_one(
    out: &mut impl Write,
    tensor: &mut Outgoing<'_>,
    values: &mut Vec<f32>,
    bytes: &mut Vec<u8>,
) -> Result<u32, StreamError> {
    let mut crc = crc32fast::Hasher::new();
    let mut start = 0;
    while start < tensor.elements() {
        let count = (tensor.elements() - start).min(CHUNK as u64) as usize;
        values.resize(count, 0.0);
        (tensor.fill)(start, values).map_err(|source| StreamError::Source { key: tensor.key.clone(), source })?;
        encode(values, tensor.dtype, bytes);
        crc.update(bytes);
        out.write_all(bytes)?;
        start += count as u64;
    }
    Ok(crc.finalize())
}

/// `values` in little-endian `dtype`, rounded to the nearest, ties to even.
fn encode(values: &[f32], dtype: DType, bytes: &mut Vec<u8>) {
    bytes.resize(values.len() * dtype.size(), 0);
    match dtype {
        DType::F32 => {
            for (to, from) in bytes.chunks_exact_mut(4).zip(values) {
                to.copy_from_slice(&from.to_le_bytes());
            }
        }
        DType::Bf16 => {
            for (to, from) in bytes.chunks_exact_mut(2).zip(values) {
                to.copy_from_slice(&half::bf16::from_f32(*from).to_le_bytes());
            }
        }
        DType::F16 => {
            for (to, from) in bytes.chunks_exact_mut(2).zip(values) {
                to.copy_from_slice(&half::f16::from_f32(*from).to_le_bytes());
            }
        }
        DType::I32 | DType::F64 => panic!("weights and moments are never stored as {dtype}"),
    }
}

/// The values of little-endian `bytes` of `dtype`.
fn decode(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        DType::Bf16 => {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *to = half::bf16::from_le_bytes(*from).to_f32();
            }
        }
        DType::F16 => {
            let halves: Vec<half::f16> =
                bytes.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b)).collect();
            halves.convert_to_f32_slice(out);
        }
        DType::I32 | DType::F64 => panic!("weights and moments are never stored as {dtype}"),
    }
}

/// Reads `out.len()` elements of `dtype` that start at byte `offset` of `file`.
pub(crate) fn read_values(file: &File, path: &Path, offset: u64, dtype: DType, out: &mut [f32]) -> Result<(), Error> {
    let mut bytes = vec![0; CHUNK.min(out.len()) * dtype.size()];
    let mut at = offset;
    for part in out.chunks_mut(CHUNK) {
        let bytes = &mut bytes[..part.len() * dtype.size()];
        read_at(file, path, at, bytes)?;
        decode(bytes, dtype, part);
        at += bytes.len() as u64;
    }
    Ok(())
}

/// Reads exactly `out.len()` bytes at `offset`; a file that has become shorter is damage, not an I/O error.
pub(crate) fn read_at(file: &File, path: &Path, offset: u64, out: &mut [u8]) -> Result<(), Error> {
    file.read_exact_at(out, offset).map_err(|source| {
        if source.kind() != io::ErrorKind::UnexpectedEof {
            return Error::io("read", path)(source);
        }
        let found = file.metadata().map_or(offset, |m| m.len());
        Error::damaged(path, Damage::Truncated { expected: offset + out.len() as u64, found })
    })
}

/// Opens `path`; a missing file is damage.
pub(crate) fn open_file(path: &Path) -> Result<File, Error> {
    File::open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::damaged(path, Damage::Missing),
        _ => Error::io("open", path)(source),
    })
}

/// Reads and checks the header of a file: its data must end where the file ends.
pub(crate) fn read_header(file: &File, path: &Path) -> Result<Header, Error> {
    let size = file.metadata().map_err(Error::io("examine", path))?.len();
    let mut length = [0; LENGTH_BYTES as usize];
    read_at(file, path, 0, &mut length)?;
    let json_bytes = u64::from_le_bytes(length);
    if json_bytes > MAX_HEADER {
        return Err(Error::header(
            path,
            format!("its length of {json_bytes} bytes is above the limit of {MAX_HEADER}"),
        ));
    }
    let mut json = vec![0; json_bytes as usize];
    read_at(file, path, LENGTH_BYTES, &mut json)?;
    let bytes = LENGTH_BYTES + json_bytes;
    let entries = parse_header(&json, bytes).map_err(|what| Error::header(path, what))?;
    let end = entries.last().map_or(bytes, |e| e.offset + e.bytes);
    match size.cmp(&end) {
        std::cmp::Ordering::Less => Err(Error::damaged(path, Damage::Truncated { expected: end, found: size })),
        std::cmp::Ordering::Greater => Err(Error::damaged(path, Damage::TooLong { expected: end, found: size })),
        std::cmp::Ordering::Equal => {
            let mut crc = crc32fast::Hasher::new();
            crc.update(&length);
            crc.update(&json);
            Ok(Header { entries, bytes, crc32: crc.finalize() })
        }
    }
}

/// The entries of a header, in the order of their data, which starts at byte `data_start`.
pub(crate) fn parse_header(json: &[u8], data_start: u64) -> Result<Vec<Entry>, String> {
    let UniqueKeys = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let metadata: Metadata = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    // Offsets are checked here: no gap, no overlap, and as long as shape and type say.
    let mut entries = Vec::new();
    for key in metadata.offset_keys() {
        let info = metadata.info(&key).expect("the key comes from this header");
        let dtype = from_safetensors(info.dtype)
            .ok_or_else(|| format!("tensor {key} is {}; F32, BF16 and F16 are supported", info.dtype))?;
        let (begin, end) = info.data_offsets;
        entries.push(Entry {
            key,
            dtype,
            shape: info.shape.clone(),
            offset: data_start + begin as u64,
            bytes: (end - begin) as u64,
        });
    }
    Ok(entries)
}

/// A JSON object without repeated keys. The safetensors parser keeps the last of several and forgets the others.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = UniqueKeys;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
                let mut seen = std::collections::HashSet::new();
                while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    if seen.contains(&key) {
                        return Err(serde::de::Error::custom(format!("tensor {key} is there twice")));
                    }
                    seen.insert(key);
                }
                Ok(UniqueKeys)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}
