//! What the host hands to a step, and the memory from which the step copies it.

use std::sync::atomic::Ordering;

use gpurun_device::{Backend, DeviceError};
use gpurun_plan::Micro;
use gpurun_types::{DType, Place, View};

use super::machine::Machine;
use crate::error::EngineError;

/// Tokens of one micro-batch: three i32 vectors of `batch * seq` elements.
#[derive(Clone, Debug, Default)]
pub struct HostBatch {
    /// Token ids.
    pub tokens: Vec<i32>,
    /// Next tokens; negative where there is no loss.
    pub targets: Vec<i32>,
    /// Index, within its sequence, of the first token of each token's document.
    pub starts: Vec<i32>,
}

/// What the host hands to a step.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// The micro-batches of this rank.
    pub micros: Vec<HostBatch>,
    /// Learning rate.
    pub learning_rate: f32,
    /// One over the loss-bearing tokens of the global batch.
    pub loss_factor: f32,
}

/// Host memory from which a step's inputs are copied: tokens, targets and starts of each micro-batch, the learning rate.
pub(super) struct Staging {
    batches: View,
    pub learning_rate: View,
    tokens: usize,
}

impl Staging {
    pub fn new(backend: &dyn Backend, micros: usize, tokens: usize) -> Result<Self, EngineError> {
        let batches = micros * 3 * tokens;
        let bytes = DType::I32.bytes(batches + 1);
        let arena = backend.allocate(Place::Host, bytes).map_err(EngineError::DoesNotFit)?;
        let view = View { arena, offset: 0, len: batches, dtype: DType::I32 };
        let learning_rate = View { offset: view.bytes(), len: 1, dtype: DType::F32, ..view };
        Ok(Self { batches: view, learning_rate, tokens })
    }

    pub fn batch(&self, micro: Micro, which: usize) -> View {
        self.batches.slice((micro.0 as usize * 3 + which) * self.tokens, self.tokens)
    }
}

impl Machine {
    /// Puts the inputs of the next run where its copies find them. Nothing of an earlier run may be under way.
    pub fn set_inputs(&self, inputs: &StepInputs) -> Result<(), DeviceError> {
        self.loss_factor.store(inputs.loss_factor.to_bits(), Ordering::Relaxed);
        // Sequences without a document's start inside may take faster kernels.
        self.backend.whole_documents(inputs.micros.iter().all(|m| m.starts.iter().all(|s| *s == 0)));
        self.backend.upload(&inputs.learning_rate.to_le_bytes(), self.staging.learning_rate)?;
        for (micro, host) in inputs.micros.iter().enumerate() {
            for (which, values) in [&host.tokens, &host.targets, &host.starts].into_iter().enumerate() {
                self.backend.upload(&i32_bytes(values), self.staging.batch(Micro(micro as u32), which))?;
            }
        }
        Ok(())
    }
}

fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
