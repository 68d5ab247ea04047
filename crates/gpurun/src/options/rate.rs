//! The learning rate as a pure function of the step.

use serde::{Deserialize, Serialize};

use super::TrainOptions;
use super::error::OptionsError;

/// Course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine from the highest rate to the lowest (Loshchilov and Hutter 2017, SGDR, without restarts).
    Cosine,
    /// A straight line from the highest rate to the lowest.
    Linear,
    /// Warm-up, stable, decay (Hu et al. 2024, MiniCPM): the highest rate, and a straight line to the lowest over the last
    /// tenth of the steps.
    Wsd,
    /// The highest rate throughout.
    Constant,
}

/// The learning rate of every step of a run.
///
/// Steps count from 0. In the warm-up of `warmup` steps (Goyal et al. 2017) the rate of step `s` is
/// `peak * (s + 1) / warmup`. After it, `p = (s - warmup) / (steps - warmup)` runs from 0 towards 1, and the rate is
///
/// - cosine: `floor + (peak - floor) * (1 + cos(pi p)) / 2`
/// - linear: `peak * (1 - p) + floor * p`
/// - wsd: `peak`, and in the last tenth of the steps the line from there, with `steps - decay` in the place of `warmup`
/// - constant: `peak`
///
/// Past the last step it stays at `floor` (`peak` with a constant schedule).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// Highest rate.
    pub peak: f64,
    /// Rate at the end.
    pub floor: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Steps in all.
    pub steps: u64,
    /// Course after the warm-up.
    pub schedule: Schedule,
}

impl LearningRate {
    /// The rate of `step`, counted from 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * ((step + 1) as f64 / self.warmup as f64);
        }
        let line = |p: f64| self.peak * (1.0 - p) + self.floor * p;
        let progress = |from: u64| fraction(step.saturating_sub(from), self.steps.saturating_sub(from));
        match self.schedule {
            Schedule::Constant => self.peak,
            Schedule::Linear => line(progress(self.warmup)),
            Schedule::Cosine => {
                let p = progress(self.warmup);
                self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * p).cos())
            }
            Schedule::Wsd => line(progress((self.steps - self.decay()).max(self.warmup))),
        }
    }

    /// Steps of the decay of a warm-up-stable-decay schedule: a tenth of all, at least one.
    #[must_use]
    pub fn decay(&self) -> u64 {
        self.steps.div_ceil(10)
    }
}

/// `part / whole`, at most 1.
fn fraction(part: u64, whole: u64) -> f64 {
    if part >= whole { 1.0 } else { part as f64 / whole as f64 }
}

impl TrainOptions {
    /// Steps of the run, where one pass over the data has `sequences` sequences.
    #[must_use]
    pub fn steps(&self, sequences: u64) -> u64 {
        match self.length {
            super::Length::Steps(steps) => steps,
            super::Length::Epochs(epochs) => {
                ((epochs * sequences as f64 / self.global_batch as f64).ceil() as u64).max(1)
            }
        }
    }

    /// The learning rate of a run of `steps` steps.
    ///
    /// # Errors
    /// When the warm-up is longer than the run.
    pub fn learning_rate(&self, steps: u64) -> Result<LearningRate, OptionsError> {
        let warmup = match self.warmup {
            Some(warmup) if warmup > steps => {
                let what = format!("a warm-up of {warmup} steps does not fit a run of {steps}");
                return Err(self.origins.invalid("warmup", what, format!("give at most {steps}, or more steps")));
            }
            Some(warmup) => warmup,
            None => super::resolve::default_warmup(steps),
        };
        Ok(LearningRate { peak: self.lr, floor: self.min_lr, warmup, steps, schedule: self.schedule })
    }
}
