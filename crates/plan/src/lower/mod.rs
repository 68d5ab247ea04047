//! Lowering: units' passes become instructions over buffers, under the policy.

mod gradients;
mod optimizer;
mod passes;
mod tied;
mod weights;

use gpurun_types::Lane;

use crate::build::Builder;
use crate::ir::{Op, Program, Region, ReplicaHome, UnitHome};
use crate::steps::Step;
use gradients::Gradients;
use passes::Passes;
use weights::Gathers;

/// A lowered training step, and where state lives.
pub(crate) struct Lowered {
    pub(crate) program: Program,
    pub(crate) homes: Vec<UnitHome>,
    pub(crate) replicas: Vec<ReplicaHome>,
}

/// The instructions of a training step.
pub(crate) fn train(b: &mut Builder<'_>, steps: &[Step]) -> Lowered {
    let own_row = Region { start: b.partials.start + b.row_index() * b.row(), len: b.row(), ..b.partials };
    b.emit(Lane::Compute, Op::Zero { dst: own_row });
    let mut gathers = Gathers::new(b, steps);
    let mut gradients = Gradients::new(b, steps);
    let mut passes = Passes::new(false);
    for (index, step) in steps.iter().enumerate() {
        gathers.before(b, steps, index);
        gradients.before(b, index);
        passes.lower(b, index, *step, &gathers, &gradients);
        gathers.after(index);
        if matches!(step, Step::Backward { .. }) {
            gradients.after(b, index);
        }
    }
    gradients.finish(b);
    let homes = optimizer::lower(b, &gradients);
    let replicas = tied::renew(b);
    Lowered { program: b.take_program(), homes, replicas }
}

/// The instructions of an evaluation.
pub(crate) fn evaluate(b: &mut Builder<'_>, steps: &[Step]) -> Program {
    let own = Region { start: b.eval_losses.start + b.row_index(), len: 1, ..b.eval_losses };
    b.emit(Lane::Compute, Op::Zero { dst: own });
    let mut gathers = Gathers::new(b, steps);
    let gradients = Gradients::none();
    let mut passes = Passes::new(true);
    for (index, step) in steps.iter().enumerate() {
        gathers.before(b, steps, index);
        passes.lower(b, index, *step, &gathers, &gradients);
        gathers.after(index);
    }
    b.gather_scalars(b.eval_losses, 1);
    b.take_program()
}
