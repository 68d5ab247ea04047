//! Backwards against finite differences of forwards: every layer, both blocks, both ends of the chain.
// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use gpurun_device::{Backend, CpuBackend, DeviceError, RopeScaling};
use gpurun_model::gradcheck::{Report, gradcheck, gradcheck_end};
use gpurun_model::layers::{
    Activations, AttentionConfig, BackwardIo, EmbeddingUnit, ForwardIo, Gelu, Layer, LayerUnit, Linear, LossHead, Norm,
    Projections, Residual, RopeConfig, SelfAttention, Sequence, SwiGlu,
};
use gpurun_model::reference::{Batch, Reference};
use gpurun_model::{BatchShape, Cx, ModelConfig, Param, Unit, layers};
use gpurun_types::DType;

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 6 };
const VOCABULARY: usize = 13;
/// Fourth-order differences at a step of 0.04 and fp32 rounding of the forward leave less than 1e-3.
const TOLERANCE: f64 = 2e-3;

fn check(layer: impl Layer + 'static) {
    let unit = LayerUnit::new("unit", layer);
    passes(&gradcheck(&unit, &CpuBackend::new(1).unwrap(), SHAPE).unwrap());
}

fn passes(report: &Report) {
    println!("{report}");
    assert!(report.worst().error < TOLERANCE, "{report}");
}

#[test]
fn linear() {
    let _limit = testkit::time_limit(30);
    check(Linear::new("a", 8, 16));
    check(Linear::new("a", 8, 5).bias(false));
    check(Linear::joined(&[("q", 16), ("k", 8), ("v", 3)], 8).unwrap());
}

#[test]
fn norms() {
    let _limit = testkit::time_limit(30);
    check(Norm::layer("n", 16, 1e-5));
    check(Norm::rms("n", 16, 1e-5));
}

#[test]
fn activations() {
    let _limit = testkit::time_limit(30);
    check(Gelu::new(16));
    check(SwiGlu::new(16));
}

fn attention() -> AttentionConfig {
    AttentionConfig {
        width: 16,
        heads: 4,
        kv_heads: 4,
        head_dim: 4,
        qkv_bias: true,
        out_bias: true,
        rope: None,
        out_std: 0.02,
    }
}

#[test]
fn attention_of_gpt2() {
    let _limit = testkit::time_limit(30);
    let names = Projections::Packed { qkv: "qkv", out: "out" };
    check(SelfAttention::new(names, attention()).unwrap());
}

#[test]
fn attention_with_grouped_heads_and_rotary_positions() {
    let _limit = testkit::time_limit(30);
    let names = Projections::Separate { q: "q", k: "k", v: "v", out: "o" };
    let scaling = RopeScaling { factor: 4.0, low_frequency: 1.0, high_frequency: 4.0, original_context: 16.0 };
    for scaling in [None, Some(scaling)] {
        let rope = Some(RopeConfig { theta: 100.0, scaling });
        check(
            SelfAttention::new(names, AttentionConfig { kv_heads: 2, rope, out_bias: false, ..attention() }).unwrap(),
        );
        // Heads whose sizes do not add up to the width.
        check(SelfAttention::new(names, AttentionConfig { kv_heads: 1, head_dim: 8, rope, ..attention() }).unwrap());
    }
}

#[test]
fn sequences_in_both_ways_of_keeping_activations() {
    let _limit = testkit::time_limit(30);
    for activations in [Activations::Lean, Activations::Kept] {
        // Cheap layers in a row, at both ends, and a width that changes.
        let parts = layers![
            Norm::layer("n1", 16, 1e-5),
            Gelu::new(16),
            Norm::rms("n2", 16, 1e-5),
            Linear::new("a", 16, 32),
            SwiGlu::new(16),
            Gelu::new(16),
        ];
        check(Sequence::with(parts, activations).unwrap());
        let nested = layers![
            Sequence::with(layers![Linear::new("a", 8, 24), Gelu::new(24)], activations).unwrap(),
            Residual::new(
                Sequence::with(layers![Norm::rms("n", 24, 1e-5), Linear::new("b", 24, 24)], activations).unwrap()
            )
            .unwrap(),
            Linear::new("c", 24, 8),
        ];
        check(Sequence::with(nested, activations).unwrap());
    }
}

#[test]
fn residuals_whose_ends_fuse_or_do_not() {
    let _limit = testkit::time_limit(30);
    check(Residual::new(Linear::new("a", 16, 16)).unwrap());
    check(Residual::new(Norm::layer("n", 16, 1e-5)).unwrap());
    check(Residual::new(Gelu::new(16)).unwrap());
    check(Residual::new(Sequence::new(layers![Linear::new("a", 16, 16), Gelu::new(16)]).unwrap()).unwrap());
    check(Residual::new(Sequence::new(layers![Gelu::new(16), Linear::new("a", 16, 16)]).unwrap()).unwrap());
    check(Residual::new(Residual::new(Linear::new("a", 16, 16)).unwrap()).unwrap());
}

/// Residuals around layers that cannot add on the way, in half precision: the addition is a pass of its own, in fp32.
#[test]
fn unfused_residuals_in_half_precision_are_near_those_in_fp32() {
    let _limit = testkit::time_limit(30);
    let gelu = Sequence::new(layers![Gelu::new(16), Linear::new("a", 16, 16).std(0.3), Gelu::new(16)]).unwrap();
    let norm = Norm::layer("n", 16, 1e-5);
    let units: Vec<Box<dyn Unit>> = vec![
        Box::new(EmbeddingUnit::new("e", "table", VOCABULARY, 16, 1.0)),
        Box::new(LayerUnit::new("gelu", Residual::new(gelu).unwrap())),
        Box::new(LayerUnit::new("norm", Residual::new(norm).unwrap())),
        Box::new(LossHead::new("head", Norm::rms("f", 16, 1e-5), "out", VOCABULARY, 0.3)),
    ];
    let model = gpurun_model::Model::new(units, VOCABULARY, None).unwrap();
    let tokens: Vec<i32> = (0..12).map(|i| i * 5 % VOCABULARY as i32).collect();
    let targets = tokens.iter().map(|t| (t + 3) % VOCABULARY as i32).collect();
    let batch = Batch { tokens, targets, starts: vec![0; 12] };
    let backend = CpuBackend::new(1).unwrap();
    let run = |dtype| {
        let mut reference = Reference::new(&backend, &model, SHAPE, dtype).unwrap();
        reference.initialise(1).unwrap();
        let loss = reference.train(&batch, 1.0, 1.0).unwrap();
        let gradients = model.params().iter().flat_map(|p| reference.gradient(&p.name).unwrap()).collect::<Vec<f32>>();
        (loss, gradients)
    };
    let (loss, right) = run(DType::F32);
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    for (dtype, tolerance) in [(DType::Bf16, 0.03), (DType::F16, 0.004)] {
        let (half, gradients) = run(dtype);
        assert!((half / loss - 1.0).abs() < tolerance / 4.0, "{dtype}: loss {half}, not {loss}");
        let difference = norm(&mut gradients.iter().zip(&right).map(|(a, b)| a - b));
        let error = difference / norm(&mut right.iter().copied());
        assert!(error < tolerance, "{dtype}: gradients are off by {error:.2e}");
    }
}

fn gpt2(tied: bool) -> ModelConfig {
    let tiny = ModelConfig::preset("tiny").unwrap();
    ModelConfig {
        layers: 1,
        width: 16,
        heads: 4,
        kv_heads: 4,
        head_dim: 4,
        ff: 24,
        vocabulary: VOCABULARY,
        context: 9,
        tied,
        ..tiny
    }
}

fn llama(tied: bool) -> ModelConfig {
    let preset = ModelConfig::preset("llama-1b").unwrap();
    let sizes = ModelConfig { layers: 1, width: 16, heads: 4, kv_heads: 2, head_dim: 4, ff: 24, ..preset };
    ModelConfig { vocabulary: VOCABULARY, context: 16, tied, qkv_bias: tied, ..sizes }
}

#[test]
fn every_unit_of_gpt2_and_llama_tied_and_untied() {
    let _limit = testkit::time_limit(60);
    let backend = CpuBackend::new(1).unwrap();
    for config in [gpt2(true), gpt2(false), llama(true), llama(false)] {
        let model = config.build().unwrap();
        let owned = model.params();
        for unit in &model.units {
            let find = |name: String| owned.iter().find(|p| p.name == name).unwrap().clone();
            let borrowed: Vec<Param> = unit.borrows().into_iter().map(find).collect();
            assert_eq!(borrowed.len(), usize::from(config.tied && unit.output_width() == 0));
            passes(&gradcheck_end(unit.as_ref(), &borrowed, VOCABULARY, &backend, SHAPE).unwrap());
        }
    }
}

#[test]
fn ends_of_the_chain_of_ones_own() {
    let _limit = testkit::time_limit(30);
    let backend = CpuBackend::new(1).unwrap();
    let embedding = EmbeddingUnit::new("e", "table", VOCABULARY, 8, 0.02);
    passes(&gradcheck_end(&embedding, &[], VOCABULARY, &backend, SHAPE).unwrap());
    let head = LossHead::new("head", Norm::layer("n", 8, 1e-5), "table", VOCABULARY, 0.02);
    passes(&gradcheck_end(&head, &[], VOCABULARY, &backend, SHAPE).unwrap());
}

/// A layer with one part of its backward taken out.
struct Broken {
    inner: Linear,
    part: Part,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Input,
    Weight,
    Bias,
    Accumulation,
}

impl Layer for Broken {
    fn describe(&self) -> String {
        "broken".to_owned()
    }
    fn input_width(&self) -> usize {
        self.inner.input_width()
    }
    fn output_width(&self) -> usize {
        self.inner.output_width()
    }
    fn params(&self) -> Vec<Param> {
        self.inner.params()
    }
    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        self.inner.forward(cx, io)
    }
    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        self.inner.backward(cx, io)?;
        match self.part {
            Part::Input => cx.backend.fill(cx.lane, io.dx, 0.0),
            Part::Weight => cx.backend.fill(cx.lane, io.grads[0], 0.0),
            Part::Bias => cx.backend.fill(cx.lane, io.grads[1].slice(2, 1), 0.0),
            Part::Accumulation => self.inner.backward(cx, io),
        }
    }
}

#[test]
fn a_part_taken_out_of_a_backward_is_found_by_name() {
    let _limit = testkit::time_limit(30);
    let backend: Box<dyn Backend> = Box::new(CpuBackend::new(1).unwrap());
    for (part, tensor) in
        [(Part::Input, "input"), (Part::Weight, "a.weight"), (Part::Bias, "a.bias"), (Part::Accumulation, "a.")]
    {
        let unit = LayerUnit::new("unit", Broken { inner: Linear::new("a", 8, 4), part });
        let report = gradcheck(&unit, backend.as_ref(), SHAPE).unwrap();
        let worst = report.worst();
        assert!(worst.error > 100.0 * TOLERANCE && worst.tensor.starts_with(tensor), "{part:?}: {report}");
        if part == Part::Bias {
            assert_eq!(worst.index, 2);
        }
        for other in report.tensors.iter().filter(|t| !t.tensor.starts_with(tensor)) {
            assert!(other.error < TOLERANCE, "{part:?}: {other:?} is sound");
        }
    }
}

#[test]
fn a_model_is_refused_when_its_units_do_not_fit() {
    let _limit = testkit::time_limit(10);
    let embedding = |width| Box::new(EmbeddingUnit::new("e", "table", VOCABULARY, width, 0.02)) as Box<dyn Unit>;
    let head =
        |table: &str| Box::new(LossHead::tied("head", Norm::rms("n", 8, 1e-5), table, VOCABULARY)) as Box<dyn Unit>;
    let build = |units| gpurun_model::Model::new(units, VOCABULARY, None).map(|_| ()).map_err(|e| e.to_string());
    assert_eq!(build(vec![embedding(8), head("table.weight")]), Ok(()));
    let refused = |units, says: &str| assert!(build(units).unwrap_err().contains(says), "{says}");
    refused(vec![embedding(16), head("table.weight")], "unit head: it takes 8 elements per token, but unit e gives 16");
    refused(vec![embedding(8), head("other.weight")], "borrows parameter other.weight, which no unit owns");
    refused(vec![head("table.weight")], "unit head: the first unit must read tokens");
    refused(vec![embedding(8)], "unit e: the last unit must compute the loss");
    refused(vec![], "needs an embedding unit");
    let block = |name| Box::new(LayerUnit::new(name, Linear::new("a", 8, 8))) as Box<dyn Unit>;
    refused(vec![embedding(8), block("b"), block("b"), head("table.weight")], "unit b: another unit has this name");
    refused(vec![embedding(8), block("b"), block("c"), head("table.weight")], "parameter a.weight is declared twice");
}
