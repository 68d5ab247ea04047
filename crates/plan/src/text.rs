//! Plans in words, for golden tests and people.

use std::fmt;

use crate::ir::{Buffer, Op, Part, PassIo, Program, RankPlan, Region};
use crate::spec::{ModelSpec, UnitId};

/// A program with the names of its buffers.
pub struct Listing<'a> {
    plan: &'a RankPlan,
    program: &'a Program,
}

impl RankPlan {
    /// The training step in words, one instruction a line.
    #[must_use]
    pub const fn train_listing(&self) -> Listing<'_> {
        Listing { plan: self, program: &self.train }
    }

    /// The evaluation in words.
    #[must_use]
    pub const fn evaluate_listing(&self) -> Listing<'_> {
        Listing { plan: self, program: &self.evaluate }
    }
}

impl Op {
    /// An instruction in a few words, for errors, pictures and for who hangs where.
    #[must_use]
    pub fn label(&self, spec: &ModelSpec) -> String {
        let name = |unit: &UnitId| spec.units[unit.0 as usize].name.as_str();
        let names = |units: &mut dyn ExactSizeIterator<Item = UnitId>| match (units.len(), units.next()) {
            (1, Some(one)) => name(&one).to_owned(),
            (count, _) => format!("{count} units"),
        };
        match self {
            Self::LoadBatch { micro, .. } => format!("load batch, micro-batch {}", micro.0),
            Self::Zero { .. } => "zero gradients".to_owned(),
            Self::Forward { unit, micro, again, .. } => {
                format!("{} {}, micro-batch {}", if *again { "recompute" } else { "forward" }, name(unit), micro.0)
            }
            Self::Restore { unit, micro, .. } => format!("restore {}, micro-batch {}", name(unit), micro.0),
            Self::Backward { unit, micro, part, .. } => {
                let what = match part {
                    Part::Whole => "backward",
                    Part::Input => "input gradient of",
                    Part::Weights => "weight gradients of",
                };
                format!("{what} {}, micro-batch {}", name(unit), micro.0)
            }
            Self::ReduceScatter { unit, .. } => format!("reduce-scatter gradients of {}", name(unit)),
            Self::AllGather { unit: Some(unit), .. } => format!("all-gather {}", name(unit)),
            Self::AllGather { unit: None, .. } => "all-gather norms and losses".to_owned(),
            Self::Add { unit, .. } => format!("add gradients of a replica of {}", name(unit)),
            Self::Send { peer, parcel, unit, micro, .. } => {
                format!("send {} {}, micro-batch {}, to {peer}", parcel.words(), name(unit), micro.0)
            }
            Self::Recv { peer, parcel, unit, micro, .. } => {
                format!("receive {} {}, micro-batch {}, from {peer}", parcel.words(), name(unit), micro.0)
            }
            Self::Norm { parts } => format!("gradient norm of {}", names(&mut parts.iter().map(|p| p.unit))),
            Self::Scalars { .. } => "global norm and loss scale".to_owned(),
            Self::Adam { parts, .. } => format!("adam {}", names(&mut parts.iter().map(|p| p.unit))),
            Self::Copy { unit, .. } => format!("copy {}", name(unit)),
        }
    }
}

struct Named<'a>(&'a [Buffer], Region);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(buffers, region) = self;
        let buffer = &buffers[region.buffer.0 as usize];
        f.write_str(&buffer.name)?;
        if region.len == buffer.elements {
            return Ok(());
        }
        write!(f, "[{}..{}]", region.start, region.start + region.len)
    }
}

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, instr) in self.program.instrs.iter().enumerate() {
            write!(f, "{index:4} {:8} {:15}", instr.lane.to_string(), instr.op.name())?;
            self.operands(f, &instr.op)?;
            if !instr.waits.is_empty() {
                let waits: Vec<String> = instr.waits.iter().map(|w| w.0.to_string()).collect();
                write!(f, "  after {}", waits.join(", "))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Listing<'_> {
    fn operands(&self, f: &mut fmt::Formatter<'_>, op: &Op) -> fmt::Result {
        let name = |r: &Region| Named(&self.plan.buffers, *r);
        match op {
            Op::LoadBatch { micro, .. } => write!(f, "micro-batch {}", micro.0),
            Op::Zero { dst } => write!(f, "{}", name(dst)),
            Op::Forward { micro, io, .. } | Op::Restore { micro, io, .. } | Op::Backward { micro, io, .. } => {
                self.pass(f, micro.0, io)
            }
            Op::ReduceScatter { src, dst, accumulate, .. } => {
                write!(f, "{} {} {}", name(src), if *accumulate { "+=>" } else { "->" }, name(dst))
            }
            Op::AllGather { src, dst, .. } | Op::Copy { src, dst, .. } => write!(f, "{} -> {}", name(src), name(dst)),
            Op::Norm { parts } => {
                self.list(f, parts, |f, part| write!(f, "{} -> {}", name(&part.src), name(&part.dst)))
            }
            Op::Add { src, dst, .. } => write!(f, "{} += {}", name(dst), name(src)),
            Op::Send { peer, src, .. } => write!(f, "{} to {peer}", name(src)),
            Op::Recv { peer, dst, .. } => write!(f, "{} from {peer}", name(dst)),
            Op::Scalars { partials, scalars, .. } => write!(f, "{} -> {}", name(partials), name(scalars)),
            Op::Adam { parts, .. } => self.list(f, parts, |f, part| {
                write!(f, "{} -> {}", name(&part.grad), name(&part.master))?;
                part.weight.as_ref().map_or(Ok(()), |w| write!(f, ", {}", name(w)))
            }),
        }
    }

    fn list<T>(
        &self,
        f: &mut fmt::Formatter<'_>,
        parts: &[T],
        write: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
    ) -> fmt::Result {
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write(f, part)?;
        }
        Ok(())
    }

    fn pass(&self, f: &mut fmt::Formatter<'_>, micro: u32, io: &PassIo) -> fmt::Result {
        let name = |r: &Region| Named(&self.plan.buffers, *r);
        write!(f, "micro-batch {micro}")?;
        for weights in &io.weights {
            write!(f, ", {}", name(weights))?;
        }
        for (word, region) in [("x", &io.x), ("dy", &io.dy), ("y", &io.y), ("dx", &io.dx)] {
            if let Some(region) = region {
                write!(f, ", {word} {}", name(region))?;
            }
        }
        Ok(())
    }
}
