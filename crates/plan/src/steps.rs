//! A step as a list of units' passes, before anything is said of memory or other ranks.

use std::ops::Range;

use crate::spec::{Micro, ModelSpec, PlanOptions, Recompute, Schedule, UnitId};

/// One pass of one unit over one micro-batch, or something that arrives or leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Tokens arrive.
    Load(Micro),
    /// The edge into the stage's first unit arrives, or (`gradient`) the gradient of the edge out of its last.
    Receive { micro: Micro, gradient: bool },
    /// The edge out of the stage's last unit leaves, or (`gradient`) the gradient of the edge into its first.
    Send { micro: Micro, gradient: bool },
    /// A forward; `again` when it repeats one in the backward phase, `keep` when its saved tensors are wanted later.
    Forward { unit: UnitId, micro: Micro, again: bool, keep: bool },
    /// Saved tensors that were freed after the forward are computed again.
    Restore { unit: UnitId, micro: Micro },
    /// A backward.
    Backward { unit: UnitId, micro: Micro },
}

/// Place of a stage in the pipeline.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    pub(crate) index: u32,
    pub(crate) stages: u32,
    /// Its units.
    pub(crate) units: Range<u32>,
}

impl Stage {
    fn first(&self) -> bool {
        self.index == 0
    }

    fn last(&self) -> bool {
        self.index + 1 == self.stages
    }
}

/// One micro-batch through a whole stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward(Micro),
    Backward(Micro),
}

/// The order of a stage. Backwards are in the order of micro-batches in every schedule, so that gradients are summed alike.
fn order(schedule: Schedule, stage: &Stage, micros: u32) -> Vec<Pass> {
    let ahead = schedule.in_flight(stage.index, stage.stages, micros);
    let mut passes: Vec<Pass> = (0..ahead).map(|m| Pass::Forward(Micro(m))).collect();
    for micro in 0..micros {
        passes.push(Pass::Backward(Micro(micro)));
        if micro + ahead < micros {
            passes.push(Pass::Forward(Micro(micro + ahead)));
        }
    }
    passes
}

/// The training step of one stage. Tokens arrive one forward ahead; what other stages send arrives one pass ahead, so that it
/// has a buffer of its own beside that pass, and what is sent leaves in the list one pass late, for the same reason.
pub(crate) fn train(spec: &ModelSpec, options: &PlanOptions, stage: &Stage) -> Vec<Step> {
    let loss = spec.units.len() as u32 - 1;
    let passes = order(options.schedule, stage, options.micro_batches);
    let mut steps = vec![Step::Load(Micro(0))];
    steps.extend(arrival(stage, passes[0]));
    for (at, pass) in passes.iter().enumerate() {
        if let Pass::Forward(Micro(micro)) = *pass
            && micro + 1 < options.micro_batches
        {
            steps.push(Step::Load(Micro(micro + 1)));
        }
        steps.extend(passes.get(at + 1).and_then(|next| arrival(stage, *next)));
        match *pass {
            Pass::Forward(micro) => {
                // The loss unit's whole work is in its backward.
                let units = stage.units.clone().filter(|u| *u != loss);
                steps.extend(units.map(|u| Step::Forward { unit: UnitId(u), micro, again: false, keep: true }));
            }
            Pass::Backward(micro) => {
                steps.extend(stage.units.clone().rev().map(|u| Step::Backward { unit: UnitId(u), micro }));
            }
        }
        steps.extend(at.checked_sub(1).and_then(|before| departure(stage, passes[before])));
    }
    steps.extend(departure(stage, passes[passes.len() - 1]));
    match options.recompute {
        Recompute::None => steps,
        Recompute::Selective => restore(spec, steps),
        Recompute::Full => recompute(steps, loss),
    }
}

/// What a pass needs of another stage.
fn arrival(stage: &Stage, pass: Pass) -> Option<Step> {
    match pass {
        Pass::Forward(micro) => (!stage.first()).then_some(Step::Receive { micro, gradient: false }),
        Pass::Backward(micro) => (!stage.last()).then_some(Step::Receive { micro, gradient: true }),
    }
}

/// What a pass has for another stage.
fn departure(stage: &Stage, pass: Pass) -> Option<Step> {
    match pass {
        Pass::Forward(micro) => (!stage.last()).then_some(Step::Send { micro, gradient: false }),
        Pass::Backward(micro) => (!stage.first()).then_some(Step::Send { micro, gradient: true }),
    }
}

/// Units that can restore what they keep do so just before their backward.
fn restore(spec: &ModelSpec, steps: Vec<Step>) -> Vec<Step> {
    let mut out = Vec::with_capacity(steps.len() * 3 / 2);
    for step in steps {
        match step {
            Step::Backward { unit, micro } if !spec.units[unit.0 as usize].restorable.is_empty() => {
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
            Step::Backward { unit, micro } if middle(unit) => {
                out.extend([Step::Forward { unit, micro, again: true, keep: true }, step]);
            }
            other => out.push(other),
        }
    }
    out
}

/// An evaluation: forward of every unit of the stage, the loss unit included.
pub(crate) fn evaluate(stage: &Stage) -> Vec<Step> {
    let micro = Micro(0);
    let forward = |u| Step::Forward { unit: UnitId(u), micro, again: false, keep: false };
    let mut steps = vec![Step::Load(micro)];
    steps.extend(arrival(stage, Pass::Forward(micro)));
    steps.extend(stage.units.clone().map(forward));
    steps.extend(departure(stage, Pass::Forward(micro)));
    steps
}
