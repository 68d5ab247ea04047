//! One JSON object a line: what a step did. Numbers are printed so that they read back to the same bits; a number that is
//! not finite is `null`.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use gpurun_types::Bytes;
use serde::Serialize;

use crate::error::EngineError;

/// The most memory that this rank's process has had at any time, as the system counts it; `None` where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HighWater {
    /// Of the device, context and libraries included; on the CPU that of the whole process.
    pub device: Option<Bytes>,
    /// Of the host.
    pub host: Option<Bytes>,
}

impl HighWater {
    /// The higher of both in each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { device: self.device.max(other.device), host: self.host.max(other.host) }
    }
}

/// What one step did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss per token over the global batch, in nats.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Tokens seen so far, over all ranks.
    pub tokens: u64,
    /// Tokens per second of this step, over all ranks.
    pub tokens_per_second: f64,
    /// Model FLOPs over the devices' peak; `null` where the peak is unknown.
    pub mfu: Option<f64>,
    /// Planned device arena of this rank, in bytes: what is allocated.
    pub device_peak_bytes: u64,
    /// Planned host arena of this rank, in bytes.
    pub host_peak_bytes: u64,
    /// Most device memory that this rank has taken so far, context and libraries included; on the CPU all of its process.
    pub device_used_bytes: Option<u64>,
    /// Most host memory that this rank's process has taken so far.
    pub host_used_bytes: Option<u64>,
    /// Wall-clock seconds of this step.
    pub step_seconds: f64,
    /// Loss scale that the step used.
    pub loss_scale: f32,
    /// True when gradients were not finite and the weights were left alone.
    pub skipped: bool,
    /// Mean held-out loss, on steps that evaluate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
}

/// The file behind `--metrics`.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file for a run that starts after `done` steps: lines of later steps (of a run that went further before it
    /// was resumed) are dropped, so that each step stands there once.
    pub fn open(path: &Path, done: u64) -> Result<Self, EngineError> {
        Self::keep_up_to(path, done).map_err(|source| failed(path, source))
    }

    fn keep_up_to(path: &Path, done: u64) -> std::io::Result<Self> {
        let mut kept = Vec::new();
        if done > 0
            && let Ok(old) = File::open(path)
        {
            for line in BufReader::new(old).lines() {
                let line = line?;
                let step = serde_json::from_str::<serde_json::Value>(&line).ok().and_then(|v| v["step"].as_u64());
                if step.is_some_and(|s| s <= done) {
                    kept.push(line);
                }
            }
        }
        let beside = path.with_extension("partial");
        let mut file = File::create(&beside)?;
        for line in kept {
            writeln!(file, "{line}")?;
        }
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        Ok(Self { path: path.to_owned(), file: OpenOptions::new().append(true).open(path)? })
    }

    /// Adds a line.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<(), EngineError> {
        let mut line = serde_json::to_vec(metrics).expect("metrics are plain data");
        line.push(b'\n');
        self.file.write_all(&line).map_err(|source| failed(&self.path, source))
    }
}

fn failed(path: &Path, source: std::io::Error) -> EngineError {
    EngineError::Metrics { path: path.display().to_string(), source }
}
