//! Loss, logits and every gradient of small models against those that PyTorch computed (`tests/golden/make_golden.py`).
// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::PathBuf;

use gpurun_device::CpuBackend;
use gpurun_model::layers::Activations;
use gpurun_model::reference::{Batch, Reference};
use gpurun_model::{BatchShape, ModelConfig};
use gpurun_types::DType;
use safetensors::SafeTensors;

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 16 };
const MODELS: [&str; 4] = ["gpt2", "gpt2-untied", "llama", "llama-variants"];

/// What the fixture of one model holds.
struct Golden {
    config: ModelConfig,
    batch: Batch,
    loss: f64,
    logits: Vec<f32>,
    weights: HashMap<String, Vec<f32>>,
    gradients: HashMap<String, Vec<f32>>,
}

impl Golden {
    fn read(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = |name: &str| {
            let data = file.tensor(name).unwrap().data();
            data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<i32>>()
        };
        let floats = |name: &str| {
            let data = file.tensor(name).unwrap().data();
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<f32>>()
        };
        let under = |prefix: &str| {
            let names = file.names().into_iter().filter_map(|full| Some((full, full.strip_prefix(prefix)?)));
            names.map(|(full, short)| (short.to_owned(), floats(full))).collect::<HashMap<_, _>>()
        };
        Self {
            config: serde_json::from_str(&header.metadata().as_ref().unwrap()["config"]).unwrap(),
            batch: Batch { tokens: ids("tokens"), targets: ids("targets"), starts: ids("starts") },
            loss: f64::from_le_bytes(file.tensor("loss").unwrap().data().try_into().unwrap()),
            logits: floats("logits"),
            weights: under("weight."),
            gradients: under("gradient."),
        }
    }

    /// Runs the model in `dtype` and compares everything; answers the largest relative error of a gradient.
    fn compare(&self, name: &str, dtype: DType, activations: Activations, scale: f32, tolerance: f64) -> f64 {
        let backend = CpuBackend::new(2).unwrap();
        let model = self.config.build_with(activations).unwrap();
        let mut reference = Reference::new(&backend, &model, SHAPE, dtype).unwrap();
        let params = model.params();
        assert_eq!(params.len(), self.weights.len(), "{name}: every parameter, and no other, is in the file");
        for param in &params {
            reference.set(&param.name, &self.weights[&param.name]).unwrap();
        }
        let factor = 1.0 / self.batch.loss_tokens() as f32;
        let loss = reference.train(&self.batch, factor, scale).unwrap();
        let loss_error = (loss / self.loss - 1.0).abs();
        assert!(loss_error < tolerance / 10.0, "{name} in {dtype}: loss {loss}, not {}", self.loss);
        let mut worst = 0.0;
        for param in &params {
            let unscaled: Vec<f32> = reference.gradient(&param.name).unwrap().iter().map(|g| g / scale).collect();
            let error = relative(&unscaled, &self.gradients[&param.name]);
            assert!(error < tolerance, "{name} in {dtype}: gradient of {} is off by {error:.2e}", param.name);
            worst = f64::max(worst, error);
        }
        worst
    }
}

/// Norm of the difference over the norm of what is right.
fn relative(got: &[f32], right: &[f32]) -> f64 {
    assert_eq!(got.len(), right.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(right).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    let error = difference / norm(&mut right.iter().map(|&v| f64::from(v)));
    if error.is_finite() { error } else { f64::INFINITY }
}

#[test]
fn gradients_in_fp32_equal_those_of_pytorch() {
    let _limit = testkit::time_limit(30);
    for name in MODELS {
        let golden = Golden::read(name);
        for activations in [Activations::Lean, Activations::Kept] {
            let worst = golden.compare(name, DType::F32, activations, 1.0, 1e-5);
            println!("{name}, {activations:?}: worst {worst:.2e}");
        }
    }
}

/// Weights and activations are rounded to 8 (bf16) or 11 (fp16) bits at each store; the error of a gradient is a few such
/// roundings of relative size 2^-9 and 2^-12, through two layers.
#[test]
fn gradients_in_half_precision_are_near_those_of_pytorch() {
    let _limit = testkit::time_limit(30);
    for name in MODELS {
        let golden = Golden::read(name);
        for (dtype, scale, tolerance) in [(DType::Bf16, 1.0, 0.04), (DType::F16, 1024.0, 0.005)] {
            let worst = golden.compare(name, dtype, Activations::Lean, scale, tolerance);
            println!("{name}, {dtype}: worst {worst:.2e}");
        }
    }
}

#[test]
fn gradients_accumulate_over_micro_batches() {
    let _limit = testkit::time_limit(30);
    let golden = Golden::read("gpt2");
    let backend = CpuBackend::new(2).unwrap();
    let model = golden.config.build().unwrap();
    let shape = BatchShape { batch: 1, seq: 16 };
    let mut reference = Reference::new(&backend, &model, shape, DType::F32).unwrap();
    for (name, values) in &golden.weights {
        reference.set(name, values).unwrap();
    }
    let factor = 1.0 / golden.batch.loss_tokens() as f32;
    let mut loss = 0.0;
    for row in 0..2 {
        let part = |ids: &[i32]| ids[row * 16..(row + 1) * 16].to_vec();
        let b = &golden.batch;
        let micro = Batch { tokens: part(&b.tokens), targets: part(&b.targets), starts: part(&b.starts) };
        loss += reference.train(&micro, factor, 1.0).unwrap();
    }
    assert!((loss / golden.loss - 1.0).abs() < 1e-6);
    for (name, right) in &golden.gradients {
        let error = relative(&reference.gradient(name).unwrap(), right);
        assert!(error < 1e-5, "{name} is off by {error:.2e}");
    }
    reference.zero_gradients().unwrap();
    assert!(golden.gradients.keys().all(|name| reference.gradient(name).unwrap().iter().all(|g| *g == 0.0)));
}

#[test]
fn evaluation_gives_the_loss_and_the_logits_of_pytorch() {
    let _limit = testkit::time_limit(30);
    for name in MODELS {
        let golden = Golden::read(name);
        let backend = CpuBackend::new(1).unwrap();
        let model = golden.config.build().unwrap();
        let mut reference = Reference::new(&backend, &model, SHAPE, DType::F32).unwrap();
        for (name, values) in &golden.weights {
            reference.set(name, values).unwrap();
        }
        let loss = reference.evaluate(&golden.batch).unwrap();
        assert!((loss / golden.loss - 1.0).abs() < 1e-6, "{name}: loss {loss}, not {}", golden.loss);
        let rows: Vec<usize> = (0..SHAPE.tokens()).step_by(5).collect();
        let vocabulary = golden.config.vocabulary;
        for (row, logits) in rows.iter().zip(reference.logits(&golden.batch, &rows).unwrap()) {
            let error = relative(&logits, &golden.logits[row * vocabulary..(row + 1) * vocabulary]);
            assert!(error < 1e-5, "{name}: logits of row {row} are off by {error:.2e}");
        }
    }
}
