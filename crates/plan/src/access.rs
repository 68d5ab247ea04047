//! What each instruction reads and writes: the one place from which waits and proofs are derived.

use crate::ir::{Op, Part, PassIo, Region};

/// The regions that an instruction touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// Regions read.
    pub reads: Vec<Region>,
    /// Regions written (what is accumulated into is in both).
    pub writes: Vec<Region>,
}

impl Accesses {
    fn both(&mut self, region: Region) {
        self.reads.push(region);
        self.writes.push(region);
    }

    fn pass(&mut self, io: &PassIo) {
        self.reads.extend(io.weights.iter().chain(&io.x).chain(&io.dy).chain(&io.batch).chain(&io.scalars));
        self.writes.extend(io.y.iter().chain(&io.dx).chain(&io.scratch));
        io.grads.iter().chain(&io.loss).for_each(|r| self.both(*r));
    }
}

/// The parts of `whole` outside `part`, which may lie in another buffer.
fn outside(whole: Region, part: Region) -> Vec<Region> {
    if part.buffer != whole.buffer {
        return vec![whole];
    }
    let (end, part_end) = (whole.start + whole.len, part.start + part.len);
    [(whole.start, part.start), (part_end, end)]
        .into_iter()
        .filter(|(from, to)| from < to)
        .map(|(start, to)| Region { start, len: to - start, ..whole })
        .collect()
}

impl Op {
    /// What the instruction reads and writes.
    #[must_use]
    pub fn accesses(&self) -> Accesses {
        let mut a = Accesses::default();
        match self {
            Self::LoadBatch { batch, learning_rate, .. } => a.writes.extend(batch.iter().chain(learning_rate)),
            Self::Zero { dst } => a.writes.push(*dst),
            Self::Forward { io, .. } => {
                a.pass(io);
                a.writes.extend(&io.saved);
            }
            Self::Restore { filled, io, .. } => {
                a.pass(io);
                for (at, region) in io.saved.iter().enumerate() {
                    // Statistics of norms that are computed on the way are written again, with the same values.
                    if filled.contains(&at) { a.writes.push(*region) } else { a.both(*region) }
                }
            }
            Self::Backward { io, part, .. } => {
                a.pass(io);
                io.saved.iter().for_each(|r| a.both(*r));
                if *part == Part::Input { &mut a.writes } else { &mut a.reads }.extend(&io.deferred);
            }
            Self::ReduceScatter { src, dst, accumulate, .. } => {
                a.reads.push(*src);
                a.writes.push(*dst);
                if *accumulate {
                    a.reads.push(*dst);
                    // The sum may be formed in this rank's part of it before it is added.
                    a.writes.push(*src);
                }
            }
            Self::AllGather { src, dst, .. } => {
                a.reads.push(*src);
                a.writes.extend(outside(*dst, *src));
            }
            Self::Add { src, dst, .. } => {
                a.reads.push(*src);
                a.both(*dst);
            }
            Self::Send { src, .. } => a.reads.push(*src),
            Self::Recv { dst, .. } => a.writes.push(*dst),
            Self::Norm { parts } => {
                a.reads.extend(parts.iter().map(|p| p.src));
                a.writes.extend(parts.iter().map(|p| p.dst));
            }
            Self::Copy { src, dst, .. } => {
                a.reads.push(*src);
                a.writes.push(*dst);
            }
            Self::Scalars { partials, learning_rate, scalars, .. } => {
                a.reads.extend([*partials, *learning_rate]);
                a.both(*scalars);
            }
            Self::Adam { parts, scalars, .. } => {
                a.reads.push(*scalars);
                for part in parts {
                    a.reads.push(part.grad);
                    [part.master, part.m, part.v].into_iter().for_each(|r| a.both(r));
                    a.writes.extend(part.weight);
                }
            }
        }
        a
    }

    /// The kind of instruction, for messages and text.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::LoadBatch { .. } => "load-batch",
            Self::Zero { .. } => "zero",
            Self::Forward { again: false, .. } => "forward",
            Self::Forward { again: true, .. } => "recompute",
            Self::Restore { .. } => "restore",
            Self::Backward { part: Part::Whole, .. } => "backward",
            Self::Backward { part: Part::Input, .. } => "backward-input",
            Self::Backward { part: Part::Weights, .. } => "backward-weights",
            Self::ReduceScatter { .. } => "reduce-scatter",
            Self::AllGather { .. } => "all-gather",
            Self::Add { .. } => "add",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
            Self::Norm { .. } => "norm",
            Self::Scalars { .. } => "scalars",
            Self::Adam { .. } => "adam",
            Self::Copy { .. } => "copy",
        }
    }
}
