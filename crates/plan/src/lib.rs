//! A training step as data: passes write instructions, the verifier proves them, others run, print and cost them.
//!
//! Pure: no I/O, no clock, no `unsafe`.
#![forbid(unsafe_code)]

mod access;
mod bound;
mod build;
mod cost;
mod draw;
mod error;
mod estimate;
mod ir;
mod lanes;
mod lower;
mod memory;
mod policy;
mod rendezvous;
mod schedule;
mod spec;
mod stages;
mod steps;
mod text;
mod verify;
mod waits;

pub use access::Accesses;
pub use bound::Bound;
pub use build::Sketch;
pub use cost::{CollectiveVolume, MemoryItem, checkpoint_bytes, collective_volume, memory_report};
pub use draw::{Drawing, svg, trace};
pub use error::PlanError;
pub use estimate::{Machine, Span, Timeline, estimate, estimate_sketch, estimate_with};
pub use ir::*;
pub use lanes::Communication;
pub use schedule::Schedule;
pub use spec::*;
pub use text::Listing;
pub use verify::{VerifyError, verify};
