//! The proof that a plan is sound, made from the finished instructions alone, on every plan, before memory is allocated.
//!
//! - Any two instructions of a rank that touch the same bytes, one of them writing, are ordered by lanes and waits.
//! - Transient memory is written by its own buffer before it is read.
//! - With every collective and message a rendezvous, all ranks get to the end.
//! - Members of a group enter its collectives on a lane in one order, with one kind, unit and length.
//! - Each stage holds the activations of as many micro-batches as its schedule says.
//! - Regions lie in their buffers, and buffers in their arenas.

use std::collections::{BTreeMap, BTreeSet};

use gpurun_types::{Bytes, Lane, Place, Rank};

use crate::ir::{Instr, InstrId, Op, Part, Plan, Program, RankPlan, Region};
use crate::rendezvous::{self, Cast};
use crate::spec::{Micro, UnitId};
use crate::waits::{Clock, Clocks, Segments, knows};

/// What is wrong with a plan.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// Two instructions touch the same bytes and nothing orders them.
    #[error("{rank}: {second} may run beside {first}, and both touch {buffer}")]
    Hazard {
        /// The rank.
        rank: Rank,
        /// The earlier instruction, index and kind.
        first: String,
        /// The later one.
        second: String,
        /// The buffer that the later one touches.
        buffer: String,
    },
    /// Memory is read that its buffer has not written.
    #[error("{rank}: {instr} reads {buffer} before anything of it was written")]
    Unwritten {
        /// The rank.
        rank: Rank,
        /// The instruction.
        instr: String,
        /// The buffer.
        buffer: String,
    },
    /// A wait for an instruction that does not come before.
    #[error("{rank}: {instr} waits for instruction {wait}, which is not before it")]
    WaitsForLater {
        /// The rank.
        rank: Rank,
        /// The instruction.
        instr: String,
        /// What it waits for.
        wait: u32,
    },
    /// No rank can go on.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// Members of a group disagree.
    #[error("{lane} lane: {first_rank} comes to {first} while {second_rank} comes to {second}")]
    Order {
        /// The lane.
        lane: Lane,
        /// One rank.
        first_rank: Rank,
        /// Its instruction.
        first: String,
        /// Another rank.
        second_rank: Rank,
        /// Its instruction.
        second: String,
    },
    /// A stage holds the activations of more or fewer micro-batches than its schedule says.
    #[error("{rank}: activations of {held} micro-batches are alive at once, and the schedule says {expected}")]
    InFlight {
        /// The rank.
        rank: Rank,
        /// Most micro-batches between their first forward and last backward.
        held: u32,
        /// What [`crate::Schedule::in_flight`] says.
        expected: u32,
    },
    /// A region or buffer that leaves its bounds.
    #[error("{rank}: {what}")]
    Bounds {
        /// The rank.
        rank: Rank,
        /// What leaves what.
        what: String,
    },
}

/// Verifies a plan of all ranks.
///
/// # Errors
/// The first fault found, with the pair of instructions named.
pub fn verify(plan: &Plan) -> Result<(), VerifyError> {
    for rank in &plan.ranks {
        bounds(rank)?;
        in_flight(plan, rank)?;
        for program in [&rank.train, &rank.evaluate] {
            hazards(rank, program)?;
        }
    }
    let programs = |pick: fn(&RankPlan) -> &Program| plan.ranks.iter().map(pick).collect::<Vec<_>>();
    let cast = Cast::All(plan.options.mesh);
    rendezvous::run(cast, &programs(|r| &r.train), |_| ())?;
    rendezvous::run(cast, &programs(|r| &r.evaluate), |_| ())
}

/// Counts passes of micro-batches through chunks between their first forward and the last part of their backward.
fn in_flight(plan: &Plan, rank: &RankPlan) -> Result<(), VerifyError> {
    let (mesh, schedule) = (plan.options.mesh, plan.options.schedule);
    let chunk_of = |unit: UnitId| rank.chunks.iter().position(|units| units.contains(&unit.0));
    let mut lives: BTreeMap<(usize, Micro), (bool, usize, usize)> = BTreeMap::new();
    let mut apart = vec![!schedule.splits(); rank.chunks.len()];
    for (index, instr) in rank.train.instrs.iter().enumerate() {
        let (unit, micro, forward) = match &instr.op {
            Op::Forward { unit, micro, .. } => (*unit, *micro, true),
            Op::Backward { unit, micro, .. } => (*unit, *micro, false),
            _ => continue,
        };
        let Some(chunk) = chunk_of(unit) else { continue };
        apart[chunk] |= matches!(instr.op, Op::Backward { part: Part::Weights, .. });
        let life = lives.entry((chunk, micro)).or_insert((forward, index, index));
        life.2 = index;
    }
    // A chunk of only the loss unit has no forward, and keeps nothing.
    let kept: BTreeSet<usize> = lives.iter().filter(|(_, life)| life.0).map(|((chunk, _), _)| *chunk).collect();
    let mut changes: Vec<(usize, i32)> =
        lives.into_values().filter(|life| life.0).flat_map(|(_, first, last)| [(first, 1), (last, -1)]).collect();
    changes.sort_unstable();
    let (mut now, mut held) = (0, 0);
    for (_, change) in changes {
        now += change;
        held = held.max(now);
    }
    let expected = schedule.in_flight(rank.rank.0 / mesh.dp, mesh.pp, plan.options.micro_batches);
    // Where units cannot defer the gradients of their weights, activations go earlier than the schedule would keep them.
    let exact = kept.len() == rank.chunks.len() && kept.iter().all(|chunk| apart[*chunk]);
    let held = held as u32;
    if held > expected || exact && held != expected {
        return Err(VerifyError::InFlight { rank: rank.rank, held, expected });
    }
    Ok(())
}

pub(crate) fn describe(instrs: &[Instr], id: InstrId) -> String {
    format!("instruction {} ({})", id.0, instrs[id.0 as usize].op.name())
}

fn bounds(rank: &RankPlan) -> Result<(), VerifyError> {
    let fault = |what: String| Err(VerifyError::Bounds { rank: rank.rank, what });
    for buffer in &rank.buffers {
        let arena = if buffer.place == Place::Host { rank.host_bytes } else { rank.device_bytes };
        if Bytes(buffer.offset) + buffer.bytes() > arena {
            return fault(format!("buffer {} ends behind its arena of {arena}", buffer.name));
        }
    }
    for instr in rank.train.instrs.iter().chain(&rank.evaluate.instrs) {
        let accesses = instr.op.accesses();
        for region in accesses.reads.iter().chain(&accesses.writes) {
            let buffer = &rank.buffers[region.buffer.0 as usize];
            if region.start + region.len > buffer.elements {
                return fault(format!("{} touches elements behind the end of {}", instr.op.name(), buffer.name));
            }
        }
    }
    Ok(())
}

/// Checks one program of one rank against its own waits.
struct Hazards<'a> {
    rank: &'a RankPlan,
    instrs: &'a [Instr],
    segments: Segments,
}

fn hazards(rank: &RankPlan, program: &Program) -> Result<(), VerifyError> {
    let instrs = &program.instrs;
    let mut check = Hazards { rank, instrs, segments: Segments::new(&rank.buffers, instrs) };
    let mut clocks = Clocks::new();
    for (index, instr) in instrs.iter().enumerate() {
        let id = InstrId(index as u32);
        let mut clock = clocks.now(instr.lane);
        for wait in &instr.waits {
            if wait.0 >= id.0 {
                let instr = describe(instrs, id);
                return Err(VerifyError::WaitsForLater { rank: rank.rank, instr, wait: wait.0 });
            }
            clocks.learn(&mut clock, *wait);
        }
        let accesses = instr.op.accesses();
        for region in &accesses.reads {
            check.read(id, *region, &clock)?;
        }
        for region in &accesses.writes {
            check.write(id, *region, &clock)?;
        }
        clocks.push(instr.lane, clock);
    }
    Ok(())
}

impl Hazards<'_> {
    fn ordered(&self, clock: &Clock, first: InstrId, second: InstrId, region: Region) -> Result<(), VerifyError> {
        if first == second || knows(clock, self.instrs[first.0 as usize].lane, first) {
            return Ok(());
        }
        Err(VerifyError::Hazard {
            rank: self.rank.rank,
            first: describe(self.instrs, first),
            second: describe(self.instrs, second),
            buffer: self.rank.buffers[region.buffer.0 as usize].name.clone(),
        })
    }

    fn read(&mut self, id: InstrId, region: Region, clock: &Clock) -> Result<(), VerifyError> {
        let buffer = &self.rank.buffers[region.buffer.0 as usize];
        let (arena, range) = self.segments.of(&self.rank.buffers, region);
        for segment in range {
            let writer = self.segments.touches[arena][segment].writer;
            if let Some((writer, _)) = writer {
                self.ordered(clock, writer, id, region)?;
            }
            if !buffer.persistent && writer.is_none_or(|(_, by)| by != region.buffer) {
                let (rank, instr) = (self.rank.rank, describe(self.instrs, id));
                return Err(VerifyError::Unwritten { rank, instr, buffer: buffer.name.clone() });
            }
            self.segments.read(arena, segment, self.instrs[id.0 as usize].lane, id);
        }
        Ok(())
    }

    fn write(&mut self, id: InstrId, region: Region, clock: &Clock) -> Result<(), VerifyError> {
        let (arena, range) = self.segments.of(&self.rank.buffers, region);
        for segment in range {
            let touch = self.segments.touches[arena][segment].clone();
            for earlier in touch.writer.map(|(w, _)| w).into_iter().chain(touch.readers.into_iter().flatten()) {
                self.ordered(clock, earlier, id, region)?;
            }
            self.segments.write(arena, segment, id, region.buffer);
        }
        Ok(())
    }
}
