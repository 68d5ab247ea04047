//! A step as a list of units' passes, before anything is said of memory or other ranks.

use crate::spec::{Micro, ModelSpec, PlanOptions, Recompute, UnitId};

/// One pass of one unit over one micro-batch, or the arrival of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Tokens arrive.
    Load(Micro),
    /// A forward; `again` when it repeats one in the backward phase, `keep` when its saved tensors are wanted later.
    Forward { unit: UnitId, micro: Micro, again: bool, keep: bool },
    /// Saved tensors that were freed after the forward are computed again.
    Restore { unit: UnitId, micro: Micro },
    /// A backward.
    Backward { unit: UnitId, micro: Micro },
}

/// The training step of one stage that holds the whole chain: micro-batch after micro-batch, forward then backward, so that
/// activations of only one micro-batch are alive. The next micro-batch's tokens arrive one ahead.
pub(crate) fn train(spec: &ModelSpec, options: &PlanOptions) -> Vec<Step> {
    let last = spec.units.len() as u32 - 1;
    let micros = options.micro_batches;
    let mut steps = vec![Step::Load(Micro(0))];
    for micro in (0..micros).map(Micro) {
        if micro.0 + 1 < micros {
            steps.push(Step::Load(Micro(micro.0 + 1)));
        }
        // The loss unit's whole work is in its backward.
        steps.extend((0..last).map(|u| Step::Forward { unit: UnitId(u), micro, again: false, keep: true }));
        steps.extend((0..=last).rev().map(|u| Step::Backward { unit: UnitId(u), micro }));
    }
    match options.recompute {
        Recompute::None => steps,
        Recompute::Selective => restore(spec, steps),
        Recompute::Full => recompute(steps, last),
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

/// An evaluation: forward of every unit, the loss unit included.
pub(crate) fn evaluate(spec: &ModelSpec) -> Vec<Step> {
    let micro = Micro(0);
    let forward = |u| Step::Forward { unit: UnitId(u), micro, again: false, keep: false };
    std::iter::once(Step::Load(micro)).chain((0..spec.units.len() as u32).map(forward)).collect()
}
