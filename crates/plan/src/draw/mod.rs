//! Pictures of a plan: memory over the step and lanes as a Gantt chart (SVG), and the same for Perfetto (JSON).

mod memory;
mod svg;
mod trace;

use crate::estimate::Timeline;
use crate::ir::Plan;
use crate::spec::ModelSpec;

pub use svg::svg;
pub use trace::trace;

/// What is drawn.
pub struct Drawing<'a> {
    /// A few words: which model, which options.
    pub title: &'a str,
    /// The plan.
    pub plan: &'a Plan,
    /// What it was built from.
    pub spec: &'a ModelSpec,
    /// When its instructions run.
    pub timeline: &'a Timeline,
    /// The times were measured, on the timeline's machine.
    pub measured: bool,
}
