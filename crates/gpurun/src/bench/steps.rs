//! The steps of a bench: some to warm up, some that are timed, some that are looked into.

use std::time::Instant;

use gpurun_engine::{Control, EngineError, HostBatch, Observer, Phase, Session, StepInputs};
use gpurun_model::BatchShape;
use gpurun_plan::Span;

use crate::run::Told;

/// Steps that are looked into; the one of median length is shown.
pub(super) const PROFILED: usize = 3;

/// Small enough that no weight goes astray on random tokens, however many steps there are.
const LEARNING_RATE: f32 = 1e-5;

/// What one rank measured.
pub(super) struct Timed {
    /// Wall-clock seconds of each timed step.
    pub seconds: Vec<f64>,
    /// When instructions ran in each of the steps that were looked into.
    pub spans: Vec<Vec<Span>>,
}

pub(super) struct Steps<'a> {
    pub session: &'a Session,
    pub control: &'a Control,
    pub told: &'a Told,
    /// Show how far it is.
    pub show: bool,
    pub warm_up: u64,
    pub timed: u64,
    pub micro_batches: u32,
    pub seed: u64,
}

impl Steps<'_> {
    /// Runs them all; `None` when asked to stop before the end.
    pub fn run(&self) -> Result<Option<Timed>, EngineError> {
        let mut timed = Timed { seconds: Vec::new(), spans: Vec::new() };
        let unlooked = self.warm_up + self.timed;
        let all = unlooked + PROFILED as u64;
        for step in 1..=all {
            self.told.phase(step, Phase::Boundary);
            if self.control.any(self.told.stop_requested())? {
                return Ok(None);
            }
            let inputs = self.inputs(step);
            self.told.phase(step, Phase::Step);
            if step > unlooked {
                let together = || self.control.barrier();
                timed.spans.push(self.session.profiled_step(step, inputs, self.told, &together)?.1);
            } else {
                let begin = Instant::now();
                self.session.step(step, inputs, self.told)?;
                if step > self.warm_up {
                    timed.seconds.push(begin.elapsed().as_secs_f64());
                }
            }
            if self.show {
                self.told.reporter.task("steps", step, all);
            } else {
                self.told.reporter.progressed();
            }
        }
        Ok(Some(timed))
    }

    fn inputs(&self, step: u64) -> StepInputs {
        let (shape, vocabulary) = (self.session.shape(), self.session.model().vocabulary);
        let (replica, replicas) = self.session.replica();
        let micro = |micro: u32| {
            let key = ((step * u64::from(self.micro_batches)) + u64::from(micro)) * replicas as u64 + replica as u64;
            random(shape, vocabulary, mixed(self.seed).wrapping_add(key))
        };
        let tokens = shape.tokens() * replicas * self.micro_batches as usize;
        StepInputs {
            micros: (0..self.micro_batches).map(micro).collect(),
            learning_rate: LEARNING_RATE,
            loss_factor: 1.0 / tokens as f32,
        }
    }
}

/// Sequences of one document each, whose every token has a target.
fn random(shape: BatchShape, vocabulary: usize, key: u64) -> HostBatch {
    let key = mixed(key);
    let token = |at: usize| (mixed(key.wrapping_add(at as u64)) % vocabulary as u64) as i32;
    // A sequence has one token more than it trains on: the last target.
    let at = |index: usize| index / shape.seq * (shape.seq + 1) + index % shape.seq;
    let indices = || 0..shape.tokens();
    HostBatch {
        tokens: indices().map(|i| token(at(i))).collect(),
        targets: indices().map(|i| token(at(i) + 1)).collect(),
        starts: vec![0; shape.tokens()],
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
fn mixed(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_next_tokens() {
        let _limit = testkit::time_limit(10);
        let shape = BatchShape { batch: 3, seq: 50 };
        let batch = random(shape, 7, 1);
        for i in 0..shape.tokens() - 1 {
            assert!((i + 1) % shape.seq == 0 || batch.targets[i] == batch.tokens[i + 1]);
        }
        let all = || batch.tokens.iter().chain(&batch.targets);
        assert!((0..7).all(|token| all().any(|t| *t == token)) && all().all(|t| (0..7).contains(t)));
        assert!(batch.starts.iter().all(|start| *start == 0));
        assert_ne!(random(shape, 7, 2).tokens, batch.tokens);
    }
}
