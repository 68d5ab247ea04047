//! A step as a list of units' passes, before anything is said of memory or other ranks.

use crate::ir::Part;
use crate::schedule::{Pass, Turn};
use crate::spec::{Micro, ModelSpec, PlanOptions, Recompute, UnitId};
use crate::stages::{Chunk, Placement};

/// One pass of one unit over one micro-batch, or something that arrives or leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Tokens arrive.
    Load(Micro),
    /// The edge out of a unit of another stage arrives, or (`gradient`) the gradient of the edge out of a unit of this one.
    Receive { unit: UnitId, micro: Micro, gradient: bool },
    /// The edge out of a unit of this stage leaves, or (`gradient`) the gradient of the edge out of a unit of another one.
    Send { unit: UnitId, micro: Micro, gradient: bool },
    /// A forward; `again` when it repeats one in the backward phase, `keep` when its saved tensors are wanted later.
    Forward { unit: UnitId, micro: Micro, again: bool, keep: bool },
    /// Saved tensors that were freed after the forward are computed again.
    Restore { unit: UnitId, micro: Micro },
    /// A backward, or one of its parts.
    Backward { unit: UnitId, micro: Micro, part: Part },
}

/// What stages do when, and who has which chunk: the same for all ranks.
pub(crate) struct Pipeline {
    pub(crate) placement: Placement,
    /// Of each stage.
    turns: Vec<Vec<Turn>>,
}

/// Place of a message in the one order in which all messages could be sent with every stage doing one thing at a time: by the
/// time when what it carries is ready in [`crate::Schedule::timed`]. No two messages are equal.
type Key = (u32, u32, Micro, bool);

impl Pipeline {
    pub(crate) fn new(placement: Placement, options: &PlanOptions) -> Self {
        let turns = options.schedule.timed(placement.stages, options.micro_batches);
        Self { placement, turns }
    }

    fn chunk(&self, turn: &Turn) -> &Chunk {
        &self.placement.chunks[turn.chunk as usize]
    }

    /// The chunk before (or behind, for a gradient) `chunk`, when another stage has it.
    fn elsewhere(&self, chunk: &Chunk, behind: bool) -> Option<&Chunk> {
        let index = if behind { chunk.index.checked_add(1) } else { chunk.index.checked_sub(1) };
        let other = self.placement.chunks.get(index? as usize)?;
        (other.stage != chunk.stage).then_some(other)
    }

    /// What a turn needs of another stage, and its place among messages.
    fn arrival(&self, turn: &Turn) -> Option<(Key, Step)> {
        let (chunk, micro) = (self.chunk(turn), turn.micro);
        let (from, unit, gradient) = match turn.pass {
            Pass::Forward => (self.elsewhere(chunk, false)?, chunk.units.start - 1, false),
            Pass::Backward | Pass::Input => (self.elsewhere(chunk, true)?, chunk.units.end - 1, true),
            Pass::Weights => return None,
        };
        let sent = self.turns[from.stage as usize].iter().find(|t| {
            let forward = t.pass == Pass::Forward;
            t.chunk == from.index && t.micro == micro && t.pass != Pass::Weights && forward != gradient
        });
        let ready = sent.expect("each stage passes each micro-batch through its chunks").end;
        Some(((ready, from.index, micro, gradient), Step::Receive { unit: UnitId(unit), micro, gradient }))
    }

    /// What a turn has for another stage, and its place among messages.
    fn departure(&self, turn: &Turn) -> Option<(Key, Step)> {
        let (chunk, micro) = (self.chunk(turn), turn.micro);
        let (unit, gradient) = match turn.pass {
            Pass::Forward => (self.elsewhere(chunk, true).map(|_| chunk.units.end - 1)?, false),
            Pass::Backward | Pass::Input => (self.elsewhere(chunk, false).map(|_| chunk.units.start - 1)?, true),
            Pass::Weights => return None,
        };
        Some(((turn.end, chunk.index, micro, gradient), Step::Send { unit: UnitId(unit), micro, gradient }))
    }

    /// What arrives before each turn of a stage.
    ///
    /// Receives are in the order of all messages, at least one turn ahead, so that what arrives has a buffer of its own beside
    /// that turn, and before any send of this stage that comes later in that order (a send stands behind the turn after the
    /// one that made it). So nothing that the first message not yet sent could wait for needs a later message: with every
    /// message a rendezvous, and sends and receives on a lane each, no stage waits for ever.
    fn arrivals(&self, turns: &[Turn]) -> Vec<Vec<Step>> {
        let mut arriving: Vec<(Key, usize, Step)> = Vec::new();
        for (at, turn) in turns.iter().enumerate() {
            arriving.extend(self.arrival(turn).map(|(key, step)| (key, at.saturating_sub(1), step)));
        }
        arriving.sort_unstable_by_key(|(key, ..)| *key);
        let leaving: Vec<(Key, usize)> =
            turns.iter().enumerate().filter_map(|(at, turn)| Some((self.departure(turn)?.0, at))).collect();
        let mut out = vec![Vec::new(); turns.len()];
        let mut limit = turns.len() - 1;
        for (key, at, step) in arriving.into_iter().rev() {
            let later = leaving.partition_point(|(other, _)| *other < key);
            let before_send = leaving.get(later).map_or(limit, |(_, turn)| turn + 1);
            limit = limit.min(at).min(before_send);
            out[limit].push(step);
        }
        out.iter_mut().for_each(|steps| steps.reverse());
        out
    }
}

/// The training step of one stage. Tokens arrive one forward ahead; what is sent leaves in the list one turn late, so that it
/// has a buffer of its own beside that turn.
pub(crate) fn train(spec: &ModelSpec, options: &PlanOptions, pipeline: &Pipeline, stage: u32) -> Vec<Step> {
    let turns = &pipeline.turns[stage as usize];
    let mut arrivals = pipeline.arrivals(turns).into_iter();
    let mut loads = loads(turns).into_iter();
    let mut steps: Vec<Step> = loads.next().into_iter().collect();
    for (at, turn) in turns.iter().enumerate() {
        if turn.pass == Pass::Forward {
            steps.extend(loads.next());
        }
        steps.extend(arrivals.next().into_iter().flatten());
        passes(spec, pipeline.chunk(turn), turn, &mut steps);
        let before = at.checked_sub(1).and_then(|before| pipeline.departure(&turns[before]));
        steps.extend(before.map(|(_, step)| step));
    }
    steps.extend(turns.last().and_then(|turn| pipeline.departure(turn)).map(|(_, step)| step));
    match options.recompute {
        Recompute::None => steps,
        Recompute::Selective => restore(spec, steps),
        Recompute::Full => recompute(steps, spec.units.len() as u32 - 1),
    }
}

/// Loads of micro-batches, in the order in which forwards first need them.
fn loads(turns: &[Turn]) -> Vec<Step> {
    let mut seen: Vec<Micro> = Vec::new();
    let mut last = None;
    for turn in turns.iter().filter(|t| t.pass == Pass::Forward) {
        // Micro-batches begin in ascending order in every schedule.
        if last.is_none_or(|last| turn.micro > last) {
            seen.push(turn.micro);
            last = Some(turn.micro);
        }
    }
    seen.into_iter().map(Step::Load).collect()
}

/// The passes of a turn, unit by unit.
fn passes(spec: &ModelSpec, chunk: &Chunk, turn: &Turn, steps: &mut Vec<Step>) {
    let (micro, loss) = (turn.micro, spec.units.len() as u32 - 1);
    let splits = |u: u32| spec.units[u as usize].splits;
    let backward = |u, part| Step::Backward { unit: UnitId(u), micro, part };
    let units = chunk.units.clone();
    match turn.pass {
        // The loss unit's whole work is in its backward.
        Pass::Forward => steps.extend(units.filter(|u| *u != loss).map(|u| Step::Forward {
            unit: UnitId(u),
            micro,
            again: false,
            keep: true,
        })),
        Pass::Backward => steps.extend(units.rev().map(|u| backward(u, Part::Whole))),
        // Nobody waits for the first unit, which has no input.
        Pass::Input => steps.extend(
            units.rev().filter(|u| *u > 0).map(|u| backward(u, if splits(u) { Part::Input } else { Part::Whole })),
        ),
        Pass::Weights => steps.extend(
            units
                .rev()
                .filter(|u| *u == 0 || splits(*u))
                .map(|u| backward(u, if u > 0 { Part::Weights } else { Part::Whole })),
        ),
    }
}

/// Units that can restore what they keep do so just before their backward.
fn restore(spec: &ModelSpec, steps: Vec<Step>) -> Vec<Step> {
    let mut out = Vec::with_capacity(steps.len() * 3 / 2);
    for step in steps {
        match step {
            Step::Backward { unit, micro, part: Part::Whole | Part::Input }
                if !spec.units[unit.0 as usize].restorable.is_empty() =>
            {
                out.extend([Step::Restore { unit, micro }, step]);
            }
            other => out.push(other),
        }
    }
    out
}

/// Units between the first and the loss unit keep nothing but their input, and run forward again before their backward.
fn recompute(steps: Vec<Step>, last: u32) -> Vec<Step> {
    let middle = |unit: UnitId| unit.0 > 0 && unit.0 < last;
    let mut out = Vec::with_capacity(steps.len() * 3 / 2);
    for step in steps {
        match step {
            Step::Forward { unit, micro, again, .. } if middle(unit) => {
                out.push(Step::Forward { unit, micro, again, keep: false });
            }
            Step::Backward { unit, micro, part: Part::Whole | Part::Input } if middle(unit) => {
                out.extend([Step::Forward { unit, micro, again: true, keep: true }, step]);
            }
            other => out.push(other),
        }
    }
    out
}

/// An evaluation: forward of every unit of the stage, the loss unit included.
pub(crate) fn evaluate(pipeline: &Pipeline, stage: u32) -> Vec<Step> {
    let micro = Micro(0);
    let forward = |u| Step::Forward { unit: UnitId(u), micro, again: false, keep: false };
    let mut steps = vec![Step::Load(micro)];
    for chunk in pipeline.placement.of_stage(stage) {
        let units = chunk.units.clone();
        let edge = |unit| (UnitId(unit), micro, false);
        if pipeline.elsewhere(chunk, false).is_some() {
            let (unit, micro, gradient) = edge(units.start - 1);
            steps.push(Step::Receive { unit, micro, gradient });
        }
        steps.extend(units.clone().map(forward));
        if pipeline.elsewhere(chunk, true).is_some() {
            let (unit, micro, gradient) = edge(units.end - 1);
            steps.push(Step::Send { unit, micro, gradient });
        }
    }
    steps
}
