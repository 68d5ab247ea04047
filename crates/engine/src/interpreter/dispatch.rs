//! One instruction: which operation, on which views.

use gpurun_device::NormRun;
use gpurun_model::Mode;
use gpurun_plan::{NormPart, Op, Part};
use gpurun_types::Lane;

use super::machine::Machine;
use super::{Fault, LogitsRequest};
use crate::network::message_index;

impl Machine {
    /// Runs one instruction on the calling thread (or enqueues it on its lane's stream).
    pub(super) fn execute(&self, op: &Op, lane: Lane, mode: Mode, logits: Option<LogitsRequest>) -> Result<(), Fault> {
        match op {
            Op::LoadBatch { micro, batch, learning_rate } => {
                for (which, region) in batch.iter().enumerate() {
                    self.backend.copy(lane, self.staging.batch(*micro, which), self.view(*region))?;
                }
                if let Some(region) = learning_rate {
                    self.backend.copy(lane, self.staging.learning_rate, self.view(*region))?;
                }
            }
            Op::Zero { dst } => self.backend.fill(lane, self.view(*dst), 0.0)?,
            Op::Forward { unit, io, .. } => self.pass(lane, *unit, io, mode, |cx, p| {
                let unit = &self.model.units[unit.0 as usize];
                match (logits, p.x) {
                    (Some(want), Some(x)) if unit.output_width() == 0 => {
                        unit.logits(cx, &p.weights, x, want.row, self.logits_view(io)?, &p.saved)
                    }
                    _ => unit.forward(cx, &p.weights, p.x, p.y, &p.saved),
                }
            })?,
            Op::Restore { unit, io, .. } => self.pass(lane, *unit, io, mode, |cx, p| {
                self.model.units[unit.0 as usize].restore(cx, &p.weights, p.x, &p.saved)
            })?,
            Op::Backward { unit, part, io, .. } => self.pass(lane, *unit, io, mode, |cx, p| {
                let unit = &self.model.units[unit.0 as usize];
                let (weights, grads, saved, deferred) = (&p.weights, &p.grads, &p.saved, &p.deferred);
                match part {
                    Part::Whole => unit.backward(cx, weights, grads, p.x, p.dy, p.dx, saved),
                    Part::Input => unit.backward_input(cx, weights, grads, p.x, p.dy, p.dx, saved, deferred),
                    Part::Weights => unit.backward_weights(cx, weights, grads, p.x, p.dy, saved, deferred),
                }
            })?,
            Op::ReduceScatter { group, src, dst, accumulate, .. } => {
                self.links.group(*group, lane).reduce_scatter(self.view(*src), self.view(*dst), *accumulate)?;
            }
            Op::AllGather { group, src, dst, .. } => {
                self.links.group(*group, lane).all_gather(self.view(*src), self.view(*dst))?;
            }
            Op::Send { peer, src, .. } => {
                let rank = self.plan.rank;
                self.links.messages(rank, *peer).send(message_index(*peer, rank), self.view(*src))?;
            }
            Op::Recv { peer, dst, .. } => {
                let rank = self.plan.rank;
                self.links.messages(*peer, rank).recv(message_index(*peer, rank), self.view(*dst))?;
            }
            Op::Add { src, dst, .. } => self.backend.add_assign(lane, self.view(*src), self.view(*dst))?,
            Op::Norm { parts } => {
                let run = |part: &NormPart| NormRun { src: self.view(part.src), partial: self.view(part.dst) };
                self.backend.norm_partial(lane, &parts.iter().map(run).collect::<Vec<_>>())?;
            }
            Op::Scalars { partials, row, units, learning_rate, scalars } => {
                self.step_scalars(lane, *partials, *row, *units, *learning_rate, *scalars)?;
            }
            Op::Adam { parts, scalars, .. } => self.adam(lane, parts, *scalars)?,
            Op::Copy { src, dst, .. } => self.backend.copy(lane, self.view(*src), self.view(*dst))?,
        }
        Ok(())
    }
}
