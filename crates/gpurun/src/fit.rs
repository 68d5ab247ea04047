//! Does a run fit, and what would? A search over plans, made before anything is allocated.

use gpurun_device::ScratchSizes;
use gpurun_engine::{EngineError, model_spec};
use gpurun_model::{BatchShape, Model};
use gpurun_plan::{Machine, MemoryItem, ModelSpec, OffloadVia, Recompute, Sketch, estimate_sketch, memory_report};
use gpurun_types::{Bytes, Place};

use crate::options::{Device, MicroBatches, Offload, TrainOptions};
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

/// What plans of one model are made for.
#[derive(Clone, Copy)]
pub(crate) struct Planner<'a> {
    pub(crate) model: &'a Model,
    pub(crate) world: u32,
    pub(crate) sizes: &'a dyn ScratchSizes,
}

impl Planner<'_> {
    /// The plan of one rank of each kind.
    pub(crate) fn sketch(&self, options: &TrainOptions) -> Result<(ModelSpec, Sketch), TrainError> {
        let micro = options.micro_batches(self.world)?;
        let shape = BatchShape { batch: micro.sequences, seq: options.seq_len };
        let spec = model_spec(self.model, shape, options.dtype, self.sizes)?;
        let sketch = Sketch::build(&spec, &plan_options(options, self.world)?).map_err(EngineError::from)?;
        Ok((spec, sketch))
    }

    /// Sequences that a micro-batch may have, the largest first.
    pub(crate) fn micro_batches(&self, options: &TrainOptions) -> Result<Vec<usize>, TrainError> {
        let whole = options.micro_batches(self.world)?;
        let share = whole.sequences * whole.count as usize;
        Ok((1..=share).rev().filter(|n| share.is_multiple_of(*n)).collect())
    }

    /// Of micro-batches, the largest first, that which to take within `limit`: the largest that fits, or in a pipeline, which
    /// few micro-batches leave idle, that of the shortest estimated step.
    fn choose(&self, options: &TrainOptions, choices: &[usize], limit: Bytes) -> Result<Option<usize>, TrainError> {
        let machine = machine(None, options, self.world);
        let mut best: Option<(f64, usize)> = None;
        for &sequences in choices {
            let changed = TrainOptions { micro_batch: Some(sequences), ..options.clone() };
            let (spec, sketch) = self.sketch(&changed)?;
            if sketch.largest().device_bytes > limit {
                continue;
            }
            if options.pp == 1 {
                return Ok(Some(sequences));
            }
            let seconds = estimate_sketch(&sketch, &spec, &machine);
            if best.is_none_or(|(least, _)| seconds < least) {
                best = Some((seconds, sequences));
            }
        }
        Ok(best.map(|(_, sequences)| sequences))
    }
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
    let planner = Planner { model, world, sizes };
    let chosen = options.micro_batches(world)?;
    let Some(limit) = options.gpu_memory_limit else { return Ok((options.clone(), chosen)) };
    let choices = match options.micro_batch {
        Some(given) => vec![given],
        None => planner.micro_batches(options)?,
    };
    if let Some(sequences) = planner.choose(options, &choices, limit)? {
        let chosen = TrainOptions { micro_batch: Some(sequences), ..options.clone() };
        let micro = chosen.micro_batches(world)?;
        return Ok((chosen, micro));
    }
    let smallest = TrainOptions { micro_batch: choices.last().copied(), ..options.clone() };
    Err(TrainError::DoesNotFit(Box::new(explain(&planner, &smallest, limit)?)))
}

fn explain(planner: &Planner<'_>, options: &TrainOptions, limit: Bytes) -> Result<DoesNotFit, TrainError> {
    let (_, sketch) = planner.sketch(options)?;
    let rank = sketch.largest();
    let mut items: Vec<MemoryItem> = memory_report(rank).into_iter().filter(|i| i.place == Place::Device).collect();
    let table = items.iter().map(|i| format!("  {:<22} {:>12}\n", i.name, i.bytes.to_string())).collect();
    items.sort_by_key(|i| std::cmp::Reverse(i.bytes));
    let largest: Vec<String> = items.iter().take(3).map(|i| format!("{} {}", i.name, i.bytes)).collect();
    let mend = match smallest_change(planner, options, limit)? {
        Some((words, needed)) => format!("it would fit with {words}: {needed}"),
        None => "no change of --micro-batch, --recompute, --zero or --offload makes it fit; use more ranks, a smaller model or \
                 a shorter --seq-len"
            .to_owned(),
    };
    Ok(DoesNotFit { needed: rank.device_bytes, limit, table, largest: largest.join(", "), mend })
}

/// The change that fits with the fewest settings changed; of several, the one whose step is estimated to be the shortest.
fn smallest_change(
    planner: &Planner<'_>,
    options: &TrainOptions,
    limit: Bytes,
) -> Result<Option<(String, Bytes)>, TrainError> {
    let machine = machine(None, options, planner.world);
    let sets = changes(planner, options)?;
    for size in 1..=SETTINGS {
        let mut best: Option<(f64, String, Bytes)> = None;
        for set in sets.iter().filter(|set| set.len() == size) {
            let mut changed = options.clone();
            set.iter().for_each(|change| change.apply(&mut changed));
            // A change that cannot be planned is no help.
            let Ok((spec, sketch)) = planner.sketch(&changed) else { continue };
            let needed = sketch.largest().device_bytes;
            if needed > limit {
                continue;
            }
            let seconds = estimate_sketch(&sketch, &spec, &machine);
            if best.as_ref().is_none_or(|(least, ..)| seconds < *least) {
                let words: Vec<String> = set.iter().map(Change::words).collect();
                best = Some((seconds, words.join(" "), needed));
            }
        }
        if let Some((_, words, needed)) = best {
            return Ok(Some((words, needed)));
        }
    }
    Ok(None)
}

/// One setting changed so that a run needs less.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    MicroBatch(usize),
    Recompute(Recompute),
    Zero(u8),
    Offload,
}

/// Settings that [`Change`] has.
const SETTINGS: usize = 4;

impl Change {
    fn words(&self) -> String {
        match self {
            Self::MicroBatch(n) => format!("--micro-batch {n}"),
            Self::Recompute(recompute) => format!("--recompute {}", recompute_name(*recompute)),
            Self::Zero(stage) => format!("--zero {stage}"),
            Self::Offload => "--offload optimizer".to_owned(),
        }
    }

    fn apply(self, options: &mut TrainOptions) {
        match self {
            Self::MicroBatch(n) => options.micro_batch = Some(n),
            Self::Recompute(recompute) => options.recompute = recompute,
            Self::Zero(stage) => options.zero = stage,
            Self::Offload => (options.offload, options.offload_via) = (Offload::Optimizer, OffloadVia::Host),
        }
    }
}

/// The name that the command line has for it.
pub(crate) const fn recompute_name(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Selective => "selective",
        Recompute::Full => "full",
    }
}

/// All sets of changes of different settings.
fn changes(planner: &Planner<'_>, options: &TrainOptions) -> Result<Vec<Vec<Change>>, TrainError> {
    let given = options.micro_batches(planner.world)?.sequences;
    let smaller = planner.micro_batches(options)?.into_iter().filter(|n| *n < given).map(Change::MicroBatch);
    let recompute = match options.recompute {
        Recompute::None => &[Recompute::Selective, Recompute::Full][..],
        Recompute::Selective => &[Recompute::Full],
        Recompute::Full => &[],
    };
    let stages = if planner.world > 1 { options.zero + 1..4 } else { 0..0 };
    let settings: [Vec<Change>; SETTINGS] = [
        smaller.collect(),
        recompute.iter().copied().map(Change::Recompute).collect(),
        stages.map(Change::Zero).collect(),
        if options.offload == Offload::None { vec![Change::Offload] } else { Vec::new() },
    ];
    let mut sets: Vec<Vec<Change>> = vec![Vec::new()];
    for setting in settings {
        let with = |set: &Vec<Change>| {
            let longer = |change| set.iter().copied().chain([change]).collect::<Vec<_>>();
            setting.iter().copied().map(longer).collect::<Vec<_>>()
        };
        let more: Vec<Vec<Change>> = sets.iter().flat_map(with).collect();
        sets.extend(more);
    }
    Ok(sets)
}

/// The machine whose rates estimates take.
///
/// # Panics
/// When there is no machine of this name: names are checked where they are read.
pub(crate) fn machine(name: Option<&str>, options: &TrainOptions, world: u32) -> Machine {
    let name = name.unwrap_or(if options.device == Device::Cuda { "h200" } else { "cpu" });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Machine::named(name, cores, world).expect("the names are checked where they are read")
}
