//! Layout-free checkpoints: written by any number of ranks, each its own part, and read by any other number.
//!
//! A checkpoint is a folder:
//!
//! ```text
//! OUT/step-00000100/rank-0.safetensors     what rank 0 owned: weights and Adam's moments, cut anywhere
//!                   rank-1.safetensors
//!                   manifest.json          tensors, pieces with checksums, model, options, scalars
//! ```
//!
//! Nothing in it knows of stages or shards. A *piece* is a run of elements of one tensor in one [`Section`]; the manifest
//! says in which file and at which byte each piece lies, so [`Checkpoint::read`] can assemble any range of any tensor.
//!
//! A save is written beside (`OUT/.step-00000100.partial/`), made durable, and renamed ([`Save`]); only then are older
//! checkpoints pruned. Whatever happens before the rename, [`latest`] still finds the previous one. Files are read with
//! positioned reads, never mapped: a mapped file that is cut short would kill the process.
//!
//! ```
//! use gpurun_checkpoint::{Meta, PieceSource, Save, Section, TensorShape, latest};
//! use gpurun_types::Rank;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let out = folder.path();
//! let (lower, upper) = ([1.0, 2.0], [3.0, 4.0, 5.0]);
//! // On every rank: what it owns, cut wherever it happens to be.
//! for (rank, start, values) in [(Rank(0), 0, &lower[..]), (Rank(1), 2, &upper[..])] {
//!     let save = Save::begin(out, 100)?;
//!     save.write_rank(rank, Section::ALL.map(|s| PieceSource::from_slice("w", s, start, values)))?;
//! }
//! // After a barrier, on rank 0:
//! let tensors = vec![TensorShape { name: "w".into(), shape: vec![5] }];
//! let meta = Meta { step: 100, tensors, ..Meta::default() };
//! Save::begin(out, 100)?.commit(meta, 2, Some(3))?;
//!
//! // Later, on any number of ranks, any range:
//! let (checkpoint, refused) = latest(out)?;
//! let mut middle = [0.0; 3];
//! checkpoint.read("w", Section::M, 1, &mut middle)?;
//! assert_eq!(middle, [2.0, 3.0, 4.0]);
//! assert!(refused.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! The [`hf`] module reads and writes folders in the layout that Hugging Face's libraries use.
#![forbid(unsafe_code)]

mod error;
mod find;
pub mod hf;
mod manifest;
mod open;
mod save;
mod tensors;

pub use error::{Damage, Error, NoCheckpoint, Refused, SourceError};
pub use find::{latest, list};
pub use manifest::{Meta, Scalar, Section, TensorShape};
pub use open::Checkpoint;
pub use save::{PieceSource, Save, check_out};
pub use tensors::Fill;
