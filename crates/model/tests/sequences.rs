//! Any chain of layers: what a sequence recomputes and which memory it shares must not change a bit.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use gpurun_device::CpuBackend;
use gpurun_model::layers::{
    Activations, AttentionConfig, EmbeddingUnit, Gelu, Layer, LayerUnit, Linear, LossHead, Norm, Projections, Residual,
    RopeConfig, SelfAttention, Sequence, SwiGlu,
};
use gpurun_model::reference::{Batch, Reference};
use gpurun_model::{BatchShape, Model, gradcheck::gradcheck, layers};
use gpurun_types::DType;
use proptest::prelude::*;

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 3 };
const VOCABULARY: usize = 11;
const WIDTH: usize = 16;

/// A layer that takes `width`, chosen by `code`, with parameters named by `name`.
fn layer(code: u8, name: &str, width: usize, activations: Activations) -> Box<dyn Layer> {
    let linear = |part: &str, input, output| Linear::new(&format!("{name}.{part}"), input, output).std(0.25);
    let norm = || Norm::layer(&format!("{name}.norm"), width, 1e-3);
    let residual = |parts| Box::new(Residual::new(Sequence::with(parts, activations).unwrap()).unwrap());
    match code {
        0 => Box::new(norm()),
        1 => Box::new(Norm::rms(name, width, 1e-3)),
        2 => Box::new(Gelu::new(width)),
        3 => Box::new(linear("same", width, width)),
        4 => Box::new(linear("wide", width, 48)),
        5 if width > 8 => Box::new(SwiGlu::new(width / 2)),
        5 => Box::new(linear("wide", width, 32)),
        6 => residual(layers![linear("a", width, width)]),
        7 => residual(layers![Gelu::new(width)]),
        8 => residual(layers![norm(), Gelu::new(width)]),
        9 => residual(layers![norm(), linear("a", width, 48), SwiGlu::new(24), linear("b", 24, width)]),
        10 => residual(layers![norm(), attention(name, width)]),
        _ => residual(layers![norm(), linear("a", width, 24), Gelu::new(24), linear("b", 24, width), Gelu::new(width)]),
    }
}

fn attention(name: &str, width: usize) -> SelfAttention {
    let projections = Projections::Packed { qkv: &format!("{name}.qkv"), out: &format!("{name}.out") };
    let config = AttentionConfig {
        width,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        qkv_bias: true,
        out_bias: true,
        rope: Some(RopeConfig { theta: 100.0, scaling: None }),
        out_std: 0.25,
    };
    SelfAttention::new(projections, config).unwrap()
}

fn sequence(codes: &[u8], activations: Activations) -> Sequence {
    let mut width = WIDTH;
    let mut layers: Vec<Box<dyn Layer>> = Vec::new();
    for (i, &code) in codes.iter().enumerate() {
        let next = layer(code, &format!("l{i}"), width, activations);
        width = next.output_width();
        layers.push(next);
    }
    Sequence::with(layers, activations).unwrap()
}

/// Bits of all gradients of a model around the sequence.
fn gradients(codes: &[u8], activations: Activations, [selective, in_parts]: [bool; 2], dtype: DType) -> Vec<u32> {
    let sequence = sequence(codes, activations);
    let norm = Norm::rms("final", sequence.output_width(), 1e-5);
    let model = Model::new(
        vec![
            Box::new(EmbeddingUnit::new("embedding", "table", VOCABULARY, WIDTH, 1.0)),
            Box::new(LayerUnit::new("sequence", sequence)),
            Box::new(LossHead::new("head", norm, "out", VOCABULARY, 0.3)),
        ],
        VOCABULARY,
        None,
    )
    .unwrap();
    let backend = CpuBackend::new(1).unwrap();
    let mut reference = Reference::new(&backend, &model, SHAPE, dtype).unwrap();
    if selective {
        reference = reference.selective();
    }
    if in_parts {
        reference = reference.in_parts();
    }
    reference.initialise(3).unwrap();
    let batch = Batch { tokens: vec![1, 2, 3, 4, 5, 6], targets: vec![2, 3, -1, 5, 6, -1], starts: vec![0; 6] };
    reference.train(&batch, 0.25, 1.0).unwrap();
    let read = |p: gpurun_model::Param| reference.gradient(&p.name).unwrap();
    model.params().into_iter().flat_map(read).map(f32::to_bits).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn recomputing_and_two_parts_change_no_bit(codes in prop::collection::vec(0u8..12, 1..7), half in any::<bool>()) {
        let _limit = testkit::time_limit(30);
        let dtype = if half { DType::Bf16 } else { DType::F32 };
        let kept = gradients(&codes, Activations::Kept, [false, false], dtype);
        prop_assert!(kept.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        for activations in [Activations::Lean, Activations::Kept] {
            for ways in [[false, false], [true, false], [false, true], [true, true]] {
                let gradients = gradients(&codes, activations, ways, dtype);
                prop_assert_eq!(&gradients, &kept, "{:?}, selective, in parts: {:?}", activations, ways);
            }
        }
    }
}

/// The same chains against finite differences, a few of them.
#[test]
fn chains_have_the_gradients_of_their_forwards() {
    let _limit = testkit::time_limit(60);
    let backend = CpuBackend::new(1).unwrap();
    for codes in [&[9, 11, 8][..], &[10, 4], &[4, 5, 1, 3], &[2, 0, 4, 1, 5], &[7, 6, 5, 5], &[0, 1, 2, 2, 3]] {
        let unit = LayerUnit::new("chain", sequence(codes, Activations::Lean));
        let report = gradcheck(&unit, &backend, SHAPE).unwrap();
        assert!(report.worst().error < 5e-3, "{codes:?}: {report}");
    }
}
