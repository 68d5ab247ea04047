//! A training step as data: passes write instructions, the verifier proves them, others run, print, cost and draw them.
//!
//! Pure: no I/O, no clock, no `unsafe`.
#![forbid(unsafe_code)]

mod ir;
mod spec;

pub use ir::*;
pub use spec::*;
