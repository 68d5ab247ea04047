//! Small models to plan for.
#![allow(dead_code)] // each test file uses its own part

use gpurun_plan::*;
use gpurun_types::{DType, Place};

/// A chain of units with these numbers of parameters; the last is the loss unit, which borrows from the first when `tied`.
pub fn chain(params: &[usize], tied: bool, dtype: DType) -> ModelSpec {
    let last = params.len() - 1;
    let tensor = |name: &str, elements| NamedTensor { name: name.into(), elements, dtype };
    let units = params
        .iter()
        .enumerate()
        .map(|(i, &elements)| UnitSpec {
            name: format!("u{i}"),
            params: vec![
                ParamSpec { name: format!("u{i}.weight"), elements, decay: true },
                ParamSpec { name: format!("u{i}.bias"), elements: 8, decay: false },
            ],
            borrows: if tied && i == last { vec![UnitId(0)] } else { vec![] },
            input: if i == 0 { 0 } else { 640 },
            output: if i == last { 0 } else { 640 },
            saved: if i == last { vec![] } else { vec![tensor("saved", 1280 + 64 * i), tensor("wide", 1920)] },
            restorable: if i == 0 || i == last { vec![] } else { vec![1] },
            scratch: vec![tensor(if i == last { "logits" } else { "scratch" }, 320)],
            forward_flops: 1e6,
            restore_flops: if i == 0 || i == last { 0.0 } else { 3e5 },
            splits: i > 0 && i < last,
            deferred: if i == 0 || i == last { vec![] } else { vec![tensor("left", 700 + 8 * i)] },
            weights_flops: if i == 0 || i == last { 0.0 } else { 1e6 },
        })
        .collect();
    ModelSpec { units, tokens: 80 }
}

pub fn options(dp: u32, stage: u8, micro_batches: u32) -> PlanOptions {
    PlanOptions {
        mesh: Mesh { dp, pp: 1 },
        micro_batches,
        policy: Policy::for_stage(stage, Place::Device).expect("a stage from 0 to 3"),
        dtype: DType::Bf16,
        adam_dtype: DType::F32,
        offload_via: OffloadVia::Host,
        offload_fraction: 1.0,
        recompute: Recompute::None,
        schedule: Schedule::OneFOneB,
        split: None,
    }
}

pub fn offloaded(mut options: PlanOptions, via: OffloadVia) -> PlanOptions {
    options.policy.optim.place = Place::Host;
    options.offload_via = via;
    options
}
