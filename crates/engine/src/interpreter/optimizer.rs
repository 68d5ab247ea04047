//! Instructions of the optimizer.

use gpurun_device::{AdamRun, AdamW, DeviceError, LossScaling, RoundingKey, StepScalars};
use gpurun_plan::{AdamPart, Region};
use gpurun_types::{Lane, View};

use super::machine::Machine;
use super::params::decay_runs;

/// Hyper-parameters of the optimizer that do not change within a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamOptions {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled decay of matrices and tables.
    pub weight_decay: f32,
    /// Largest global gradient norm; infinite for none.
    pub clip: f32,
    /// Dynamic loss scaling.
    pub scaling: Option<LossScaling>,
    /// Seed of the random bits that round moments to bf16.
    pub seed: u64,
}

impl Machine {
    pub(super) fn step_scalars(
        &self,
        lane: Lane,
        partials: Region,
        row: usize,
        units: usize,
        learning_rate: Region,
        scalars: Region,
    ) -> Result<(), DeviceError> {
        self.backend.step_scalars(
            lane,
            StepScalars {
                partials: self.view(partials),
                shards: partials.len / row,
                row,
                units,
                scalars: self.view(scalars),
                learning_rate: self.view(learning_rate),
                clip: self.adam.clip,
                beta1: self.adam.beta1,
                beta2: self.adam.beta2,
                scaling: self.adam.scaling,
            },
        )
    }

    pub(super) fn adam(&self, lane: Lane, parts: &[AdamPart], scalars: Region) -> Result<(), DeviceError> {
        let runs: Vec<AdamRun> = parts.iter().flat_map(|part| self.adam_runs(part)).collect();
        let AdamOptions { beta1, beta2, eps, .. } = self.adam;
        self.backend.adamw(lane, &AdamW { runs: &runs, scalars: self.view(scalars), beta1, beta2, eps })
    }

    /// The stretches of a unit's part that share one weight decay.
    fn adam_runs(&self, part: &AdamPart) -> Vec<AdamRun> {
        let AdamPart { unit, first, .. } = *part;
        let [grad, master, m, v] = [part.grad, part.master, part.m, part.v].map(|r| self.view(r));
        let weight = part.weight.map(|r| self.view(r));
        let run = |(start, end, decay): (usize, usize, bool)| {
            let cut = |view: View| view.slice(start - first, end - start);
            AdamRun {
                master: cut(master),
                m: cut(m),
                v: cut(v),
                grad: cut(grad),
                weight: weight.map(cut),
                weight_decay: if decay { self.adam.weight_decay } else { 0.0 },
                rounding: RoundingKey::new(self.adam.seed, unit.0, start as u64),
            }
        };
        decay_runs(self.own_params(unit), first, first + master.len).into_iter().map(run).collect()
    }
}
