//! The words every room shares: data types, byte and element counts, ranks and views.
//!
//! This crate is a leaf. It holds plain data only: no I/O, no `unsafe`, no behaviour beyond arithmetic on sizes.
#![forbid(unsafe_code)]

use std::fmt;

use serde::{Deserialize, Serialize};

/// Storage format of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: 8 exponent bits, 7 fraction bits.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// Signed 32-bit integer (token ids, positions).
    I32,
    /// IEEE 754 binary64 (partial sums of norms and losses).
    F64,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 => 8,
        }
    }

    /// Bytes of `elements` elements.
    #[must_use]
    pub const fn bytes(self, elements: usize) -> Bytes {
        Bytes((self.size() * elements) as u64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
            Self::I32 => "i32",
            Self::F64 => "fp64",
        })
    }
}

/// A count of bytes. Displayed in binary units (`1.5 GiB`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Rounded up to a multiple of `align`, which must not be zero.
    #[must_use]
    pub const fn align_up(self, align: u64) -> Self {
        Self(self.0.div_ceil(align) * align)
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), |a, b| a + b)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.2} {}", UNITS[unit]) }
    }
}

/// Index of a worker in the whole job, `0..world_size`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Rank {
    /// As an index into per-rank tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Where an arena lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// Memory of the accelerator (on the CPU backend: an ordinary arena).
    Device,
    /// Memory of the host, pinned when there is an accelerator.
    Host,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}

/// An in-order queue of work: a stream on CUDA, a thread on the CPU. Work on different lanes runs at the same time
/// unless a wait orders it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lane {
    /// Forward, backward, norms and the optimizer on the device.
    Compute,
    /// All-gathers of parameters.
    Gather,
    /// Reduce-scatters of gradients, and the small all-gathers of norms and losses.
    Reduce,
    /// Sends to other stages. Apart from [`Lane::Receive`], as in one queue a send that waits for its partner would hold up
    /// the receive that the partner waits for.
    Send,
    /// Receives from other stages.
    Receive,
    /// Host to device copies.
    CopyIn,
    /// Device to host copies.
    CopyOut,
    /// The optimizer on the host.
    Host,
}

impl Lane {
    /// Every lane, in the order of [`Lane::index`].
    pub const ALL: [Self; 8] =
        [Self::Compute, Self::Gather, Self::Reduce, Self::Send, Self::Receive, Self::CopyIn, Self::CopyOut, Self::Host];

    /// Index into per-lane tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Compute => "compute",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::CopyIn => "copy-in",
            Self::CopyOut => "copy-out",
            Self::Host => "host",
        })
    }
}

/// Identity of an arena within one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArenaId(pub u32);

/// A run of elements in an arena: plain data, no lifetime. Who may touch it at what time is the plan's to prove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The arena.
    pub arena: ArenaId,
    /// Offset from the arena's start, in bytes. A multiple of the element size.
    pub offset: u64,
    /// Number of elements.
    pub len: usize,
    /// Element type.
    pub dtype: DType,
}

impl View {
    /// Size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        (self.len * self.dtype.size()) as u64
    }

    /// Elements `start..start + len` of this view.
    ///
    /// # Panics
    /// When the range leaves the view: a bug of the caller, never of a user.
    #[must_use]
    pub fn slice(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.len, "slice {start}+{len} of a view of {} elements", self.len);
        Self { offset: self.offset + (start * self.dtype.size()) as u64, len, ..self }
    }

    /// The same bytes read as another element type; the byte count must divide.
    ///
    /// # Panics
    /// When the byte count is no multiple of the new element size: a bug of the caller.
    #[must_use]
    pub fn cast(self, dtype: DType) -> Self {
        let bytes = self.bytes() as usize;
        assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are no whole number of {dtype}");
        Self { len: bytes / dtype.size(), dtype, ..self }
    }
}
