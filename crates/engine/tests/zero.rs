//! What the ZeRO paper (Rajbhandari et al. 2020) says of memory and of what is sent, of plans and of runs.

mod common;

use common::{Case, Log, Noting, SEQ, gpt2, llama};
use gpurun_comm::wrap::Call;
use gpurun_device::CpuSizes;
use gpurun_engine::{EngineError, HostNetwork, Network, Session, model_spec};
use gpurun_model::{BatchShape, ModelConfig};
use gpurun_plan::{
    Kind, Mesh, ModelSpec, OffloadVia, Plan, PlanOptions, Policy, Recompute, Schedule, Sketch, collective_volume,
    memory_report,
};
use gpurun_types::{Bytes, DType, Place, Rank};

fn spec_of(case: &Case) -> ModelSpec {
    let batch = case.global_batch / (case.ranks * case.micro_batches) as usize;
    let model = case.model.build().expect("a valid model");
    model_spec(&model, BatchShape { batch, seq: SEQ }, case.dtype, &CpuSizes).expect("it can be described")
}

/// Elements that each rank sends in a step, from the numbers of elements of the units, padded to equal shards.
///
/// The paper's 2 Psi for stages 0 to 2 and 3 Psi for stage 3, with one micro-batch and `(n - 1) / n` of each buffer. With several
/// micro-batches stage 2 reduces after each, and stage 3 also gathers for each. Stage 3 sends less than 3 Psi in two places: the
/// head's weights are gathered once a micro-batch, since its forward is within its backward, and the first unit's once
/// between the backward of one micro-batch and the forward of the next. A tied head needs the table too.
fn expected(case: &Case, units: &[u64], tied: bool) -> u64 {
    let (micros, n) = (u64::from(case.micro_batches), u64::from(case.ranks));
    let (psi, first, head) = (units.iter().sum::<u64>(), units[0], units[units.len() - 1]);
    let elements = match case.stage {
        0 | 1 => 2 * psi,
        2 => (micros + 1) * psi,
        _ => 3 * micros * psi - micros * head - (micros - 1) * first + if tied { micros * first } else { 0 },
    };
    elements / n * (n - 1)
}

#[test]
fn what_a_step_sends_is_the_papers_formula_in_the_plan_and_on_the_wire() {
    let _limit = testkit::time_limit(60);
    for (model, tied) in [(llama(), false), (gpt2(), true)] {
        for ranks in [2, 3, 4] {
            for micro_batches in [1, 3] {
                for stage in 0..=3 {
                    let global_batch = (ranks * micro_batches) as usize;
                    let plain = Case::plain(model.clone());
                    let case = Case { ranks, micro_batches, stage, global_batch, steps: 1, ..plain };
                    let spec = spec_of(&case);
                    let units: Vec<u64> = spec.units.iter().map(|u| u.layout(ranks).padded as u64).collect();
                    let want = expected(&case, &units, tied);
                    let plan = Plan::build(&spec, &case.options().plan).expect("legal");
                    let log = Log::default();
                    case.run_over(|rank, inner| -> Box<dyn Network> {
                        Box::new(Noting { rank, inner, log: log.clone() })
                    });
                    for rank in &plan.ranks {
                        assert_eq!(collective_volume(rank).elements, want, "planned: {case:?}");
                        assert_eq!(seen(&log, rank.rank, ranks), want, "seen: {case:?}");
                    }
                }
            }
        }
    }
}

/// Elements that a rank sent in collectives over weights and gradients; norms and losses go in fp64.
fn seen(log: &Log, rank: Rank, ranks: u32) -> u64 {
    let log = log.lock().expect("nobody panicked");
    let records = log.iter().filter(|((of, ..), _)| *of == rank).flat_map(|(_, recording)| recording.records());
    let weights = records.filter(|r| r.dtype != DType::F64);
    weights
        .map(|record| {
            assert!(matches!(record.call, Call::AllGather | Call::ReduceScatter), "{record:?}");
            (record.elements / ranks as usize * (ranks as usize - 1)) as u64
        })
        .sum()
}

/// One point of the grid of plans.
struct Planned {
    options: PlanOptions,
    spec: ModelSpec,
    sketch: Sketch,
}

impl Planned {
    /// Bytes of persistent buffers, and of those of one step where each unit has one of its own.
    fn bytes(&self, kind: Kind, place: Place) -> f64 {
        let buffers = self.sketch.stages[0].buffers.iter();
        buffers.filter(|b| (b.kind, b.place) == (kind, place)).map(|b| b.bytes().0 as f64).sum()
    }

    /// Compares with `bytes` a parameter over `parts` ranks: never less, and no more than padding above.
    fn follows(&self, kind: Kind, place: Place, bytes: f64, parts: u32) {
        let parameters: usize = self.spec.units.iter().map(gpurun_plan::UnitSpec::elements).sum();
        let ideal = bytes * parameters as f64 / f64::from(parts);
        // 8 elements at most after each parameter, 128 after each shard.
        let tensors: usize = self.spec.units.iter().map(|u| u.params.len()).sum();
        let padding = bytes * (8 * tensors + 128 * self.spec.units.len() * self.options.mesh.dp as usize) as f64;
        let got = self.bytes(kind, place);
        let (most, options) = (ideal + padding / f64::from(parts), &self.options);
        assert!(ideal <= got && got <= most, "{kind:?}, {place}: {got}, not {ideal} to {most}: {options:?}");
    }

    fn check(&self, stage: u8) {
        let PlanOptions { dtype, adam_dtype, offload_via, .. } = self.options;
        let parts = |on: bool| if on { self.options.mesh.dp } else { 1 };
        self.follows(Kind::Weights, Place::Device, dtype.size() as f64, parts(stage == 3));
        // Until stage 2 whole gradients are summed; from it on shards are, and whole ones live for two units at a time.
        if stage < 2 || self.options.mesh.dp == 1 {
            self.follows(Kind::Gradients, Place::Device, 4.0, 1);
        } else {
            let shards = self.sketch.stages[0].buffers.iter().filter(|b| b.kind == Kind::Gradients && b.persistent);
            let bytes: u64 = shards.filter(|b| b.place == Place::Device).map(|b| b.bytes().0).sum();
            let layouts = self.spec.units.iter().map(|u| 4 * u.layout(self.options.mesh.dp).shard as u64);
            assert_eq!(bytes, layouts.sum::<u64>(), "{:?}", self.options);
        }
        let place = self.options.policy.optim.place;
        // fp32 weights are their own master, unless the host steps them.
        let master = dtype != DType::F32 || place == Place::Host && offload_via == OffloadVia::Host;
        let states =
            [(Kind::Master, DType::F32, master), (Kind::MomentM, adam_dtype, true), (Kind::MomentV, adam_dtype, true)];
        for (kind, dtype, there) in states {
            let bytes = if there { dtype.size() as f64 } else { 0.0 };
            self.follows(kind, place, bytes, parts(stage >= 1));
            let elsewhere = if place == Place::Host { Place::Device } else { Place::Host };
            assert_eq!(self.bytes(kind, elsewhere), 0.0);
        }
        let rank = &self.sketch.stages[0];
        for (place, arena) in [(Place::Device, rank.device_bytes), (Place::Host, rank.host_bytes)] {
            let named: Bytes = memory_report(rank).iter().filter(|i| i.place == place).map(|i| i.bytes).sum();
            assert_eq!(named, arena, "the items are all of it");
        }
    }
}

#[test]
fn bytes_of_presets_follow_the_paper() {
    let _limit = testkit::time_limit(120);
    for preset in ["gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m", "llama-1b", "llama-7b"] {
        let model = ModelConfig::preset(preset).expect("a preset").build().expect("a valid model");
        for dtype in [DType::F32, DType::Bf16] {
            let spec = model_spec(&model, BatchShape { batch: 1, seq: 512 }, dtype, &CpuSizes).expect("described");
            for dp in [1, 2, 3, 8] {
                for stage in 0..=3 {
                    for (place, offload_via) in [
                        (Place::Device, OffloadVia::Host),
                        (Place::Host, OffloadVia::Host),
                        (Place::Host, OffloadVia::Stream),
                    ] {
                        let options = PlanOptions {
                            mesh: Mesh { dp, pp: 1 },
                            micro_batches: 1,
                            policy: Policy::for_stage(stage, place).expect("a stage"),
                            dtype,
                            adam_dtype: if dp == 2 { DType::Bf16 } else { DType::F32 },
                            offload_via,
                            offload_fraction: 1.0,
                            recompute: Recompute::None,
                            schedule: Schedule::OneFOneB,
                            split: None,
                        };
                        let sketch = Sketch::build(&spec, &options).expect("legal");
                        Planned { options, spec: spec.clone(), sketch }.check(stage);
                    }
                }
            }
        }
    }
}

#[test]
fn four_ranks_train_weights_that_are_larger_than_the_memory_of_each() {
    let _limit = testkit::time_limit(120);
    let model = ModelConfig { layers: 40, width: 32, head_dim: 8, ff: 96, ..llama() };
    let parameters: usize = model.build().expect("a valid model").params().iter().map(|p| p.elements()).sum();
    let limit = Bytes(4 * parameters as u64 * 9 / 10);
    let plain = Case {
        ranks: 4,
        global_batch: 4,
        steps: 12,
        limit: Some(limit),
        recompute: Recompute::Full,
        ..Case::plain(model)
    };
    let refused = |case: &Case| {
        let backend = std::sync::Arc::new(gpurun_device::CpuBackend::new(1).expect("a CPU backend"));
        let network = HostNetwork { fabric: None, backend: backend.clone() };
        let model = std::sync::Arc::new(case.model.build().expect("a valid model"));
        matches!(Session::new(backend, model, &network, Rank(0), case.options()), Err(EngineError::OverLimit { .. }))
    };
    for stage in 0..3 {
        let case = Case { stage, offload: Some(OffloadVia::Host), ..plain.clone() };
        assert!(refused(&case), "whole weights do not fit: stage {stage}");
    }
    let case = Case { stage: 3, offload: Some(OffloadVia::Host), ..plain };
    let out = case.run();
    let unlimited = Case { limit: None, stage: 1, offload: None, recompute: Recompute::None, ..case };
    common::assert_same_bits(&out, &unlimited.run(), "with and without a limit");
    assert!(out.losses.iter().all(|loss| loss.is_finite()), "{:?}", out.losses);
}
