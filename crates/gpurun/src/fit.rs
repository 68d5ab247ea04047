//! Does a run fit? A search over plans, made before anything is allocated.

use gpurun_device::ScratchSizes;
use gpurun_engine::{EngineError, model_spec};
use gpurun_model::{BatchShape, Model};
use gpurun_plan::{MemoryItem, OffloadVia, Plan, Recompute, memory_report};
use gpurun_types::{Bytes, Place};

use crate::options::{MicroBatches, Offload, TrainOptions};
use crate::train::{TrainError, plan_options};

/// A run that does not fit: what it would hold, and the smallest change that fits.
#[derive(Debug, thiserror::Error)]
#[error(
    "does not fit: a rank needs {needed} of device memory, and --gpu-memory-limit allows {limit}\n{table}largest: {largest}\n{mend}"
)]
pub struct DoesNotFit {
    needed: Bytes,
    limit: Bytes,
    table: String,
    largest: String,
    mend: String,
}

/// The options, with micro-batches that fit the limit: the largest where the user has not chosen.
///
/// # Errors
/// When the options are wrong, or nothing fits.
pub(crate) fn fitted(
    options: &TrainOptions,
    model: &Model,
    world: u32,
    sizes: &dyn ScratchSizes,
) -> Result<(TrainOptions, MicroBatches), TrainError> {
    let chosen = options.micro_batches(world)?;
    let Some(limit) = options.gpu_memory_limit else { return Ok((options.clone(), chosen)) };
    for with in micro_batch_choices(options, world)? {
        if device_bytes(&with, model, world, sizes)? <= limit {
            let micro = with.micro_batches(world)?;
            return Ok((with, micro));
        }
    }
    let smallest = micro_batch_choices(options, world)?.pop().unwrap_or_else(|| options.clone());
    Err(TrainError::DoesNotFit(Box::new(explain(&smallest, model, world, sizes, limit)?)))
}

/// The options with each micro-batch that may be tried, the largest first.
fn micro_batch_choices(options: &TrainOptions, world: u32) -> Result<Vec<TrainOptions>, TrainError> {
    if options.micro_batch.is_some() {
        return Ok(vec![options.clone()]);
    }
    let whole = options.micro_batches(world)?;
    let share = whole.sequences * whole.count as usize;
    let divisors = (1..=share).rev().filter(|n| share.is_multiple_of(*n));
    Ok(divisors.map(|n| TrainOptions { micro_batch: Some(n), ..options.clone() }).collect())
}

/// The plan of one rank: all hold the same.
fn plan(
    options: &TrainOptions,
    model: &Model,
    world: u32,
    sizes: &dyn ScratchSizes,
) -> Result<gpurun_plan::RankPlan, TrainError> {
    let micro = options.micro_batches(world)?;
    let shape = BatchShape { batch: micro.sequences, seq: options.seq_len };
    let spec = model_spec(model, shape, options.dtype, sizes)?;
    let plan = Plan::build(&spec, &plan_options(options, world)?).map_err(EngineError::from)?;
    Ok(plan.ranks.into_iter().next().expect("at least one rank"))
}

fn device_bytes(
    options: &TrainOptions,
    model: &Model,
    world: u32,
    sizes: &dyn ScratchSizes,
) -> Result<Bytes, TrainError> {
    Ok(plan(options, model, world, sizes)?.device_bytes)
}

fn explain(
    options: &TrainOptions,
    model: &Model,
    world: u32,
    sizes: &dyn ScratchSizes,
    limit: Bytes,
) -> Result<DoesNotFit, TrainError> {
    let rank = plan(options, model, world, sizes)?;
    let mut items: Vec<MemoryItem> = memory_report(&rank).into_iter().filter(|i| i.place == Place::Device).collect();
    let table = items.iter().map(|i| format!("  {:<22} {:>12}\n", i.name, i.bytes.to_string())).collect();
    items.sort_by_key(|i| std::cmp::Reverse(i.bytes));
    let largest: Vec<String> = items.iter().take(3).map(|i| format!("{} {}", i.name, i.bytes)).collect();
    let mut mend = None;
    for (words, changed) in changes(options, world) {
        // A change that cannot be planned is no help.
        if device_bytes(&changed, model, world, sizes).is_ok_and(|b| b <= limit) {
            mend = Some(format!("it would fit with {words}"));
            break;
        }
    }
    let mend = mend.unwrap_or_else(|| {
        "no change of --micro-batch, --recompute, --zero or --offload makes it fit; use more ranks, a smaller model or a shorter --seq-len".to_owned()
    });
    Ok(DoesNotFit { needed: rank.device_bytes, limit, table, largest: largest.join(", "), mend })
}

/// One way to need less.
type Change = (&'static str, fn(&mut TrainOptions));

/// Ways to need less, the cheapest in speed first.
fn changes(options: &TrainOptions, world: u32) -> Vec<(String, TrainOptions)> {
    let mut single: Vec<Change> = Vec::new();
    if options.micro_batch.is_some_and(|n| n > 1) {
        single.push(("--micro-batch 1", |o| o.micro_batch = Some(1)));
    }
    if world > 1 {
        let stages: [Change; 3] =
            [("--zero 1", |o| o.zero = 1), ("--zero 2", |o| o.zero = 2), ("--zero 3", |o| o.zero = 3)];
        single.extend(&stages[usize::from(options.zero).min(3)..]);
    }
    if options.recompute == Recompute::None {
        single.push(("--recompute full", |o| o.recompute = Recompute::Full));
    }
    if options.offload == Offload::None {
        single.push(("--offload optimizer", |o| (o.offload, o.offload_via) = (Offload::Optimizer, OffloadVia::Host)));
    }
    // One change before two, two before three: sets of changes by size, each in the order above.
    let mut sets: Vec<Vec<Change>> = (1u32..1 << single.len())
        .map(|mask| (0..single.len()).filter(|i| mask >> i & 1 == 1).map(|i| single[i]).collect())
        .collect();
    sets.sort_by_key(Vec::len);
    sets.into_iter()
        .map(|set| {
            let mut changed = options.clone();
            set.iter().for_each(|(_, change)| change(&mut changed));
            (set.iter().map(|(words, _)| *words).collect::<Vec<_>>().join(" "), changed)
        })
        .collect()
}
