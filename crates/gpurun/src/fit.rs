//! Does a run fit, and what would? A search over plans, made before anything is allocated.

use gpurun_device::ScratchSizes;
use gpurun_engine::{EngineError, model_spec};
use gpurun_model::{BatchShape, Model};
use gpurun_plan::{
    Machine, MemoryItem, ModelSpec, OffloadVia, RankPlan, Recompute, Sketch, estimate_sketch, memory_report,
};
use gpurun_types::{Bytes, Place};

use crate::offload;
use crate::options::{Device, MicroBatches, Offload, TrainOptions, spelled};
use crate::train::{TrainError, plan_options};

/// A run that does not fit: what it would hold, and the smallest change that fits.
#[derive(Debug, thiserror::Error)]
#[error("does not fit: {what}\n{table}largest: {largest}\n{mend}")]
pub struct DoesNotFit {
    what: String,
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
        let spec = self.spec(options)?;
        let sketch = Sketch::build(&spec, &plan_options(options, self.world)?).map_err(EngineError::from)?;
        Ok((spec, sketch))
    }

    /// The model's sizes for the micro-batches of `options`.
    pub(crate) fn spec(&self, options: &TrainOptions) -> Result<ModelSpec, TrainError> {
        let micro = options.micro_batches(self.world)?;
        let shape = BatchShape { batch: micro.sequences, seq: options.seq_len };
        Ok(model_spec(self.model, shape, options.dtype, self.sizes)?)
    }

    /// Sequences that a micro-batch may have, the largest first.
    pub(crate) fn micro_batches(&self, options: &TrainOptions) -> Result<Vec<usize>, TrainError> {
        let whole = options.micro_batches(self.world)?;
        let share = whole.sequences * whole.count as usize;
        Ok((1..=share).rev().filter(|n| share.is_multiple_of(*n)).collect())
    }

    /// The options with micro-batches and the share of state on the host chosen, where they are left open, so that the plan fits
    /// the limit; `None` when none does. Of the micro-batches it takes the largest that fits, or in a pipeline, which few
    /// micro-batches leave idle, that of the shortest estimated step.
    pub(crate) fn within(&self, options: &TrainOptions) -> Result<Option<TrainOptions>, TrainError> {
        let Some(limit) = options.gpu_memory_limit else { return Ok(Some(options.clone())) };
        let choices = match options.micro_batch {
            Some(given) => vec![given],
            None => self.micro_batches(options)?,
        };
        let machine = machine(None, options, self.world);
        let mut best: Option<(f64, TrainOptions)> = None;
        for sequences in choices {
            let changed = TrainOptions { micro_batch: Some(sequences), ..options.clone() };
            let Some(changed) = offload::with_fraction(self, changed, limit)? else { continue };
            if options.pp == 1 {
                return Ok(Some(changed));
            }
            let seconds = self.seconds(&changed, &machine)?;
            if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
                best = Some((seconds, changed));
            }
        }
        Ok(best.map(|(_, options)| options))
    }

    /// Device memory of the rank that needs most.
    pub(crate) fn device_bytes(&self, options: &TrainOptions) -> Result<Bytes, TrainError> {
        Ok(self.sketch(options)?.1.largest().device_bytes)
    }

    /// Estimated seconds of a step.
    pub(crate) fn seconds(&self, options: &TrainOptions, machine: &Machine) -> Result<f64, TrainError> {
        let (spec, sketch) = self.sketch(options)?;
        Ok(estimate_sketch(&sketch, &spec, machine))
    }
}

/// Options with all chosen that they left to the program.
pub(crate) struct Fitted {
    pub(crate) options: TrainOptions,
    pub(crate) micro: MicroBatches,
    /// What was chosen and why, a line each.
    pub(crate) notes: Vec<String>,
}

/// Chooses what the options leave open: micro-batches that fit the limit, where Adam's state is and who steps it. `rates` gives
/// the machine's rates, and where they are from, when the last of these has to be decided; it is given the bytes of state.
///
/// # Errors
/// When the options are wrong, or nothing fits.
pub(crate) fn fitted(
    planner: &Planner<'_>,
    options: &TrainOptions,
    rates: offload::Rates<'_>,
) -> Result<Fitted, TrainError> {
    options.micro_batches(planner.world)?;
    let mut fitting = Vec::new();
    for candidate in offload::candidates(options) {
        fitting.extend(planner.within(&candidate)?);
    }
    if fitting.is_empty() {
        return Err(TrainError::DoesNotFit(Box::new(over_limit(planner, options)?)));
    }
    let (chosen, mut notes) = offload::faster(planner, fitting, rates)?;
    notes.extend(offload::explain_fraction(planner, options, &chosen)?);
    let micro = chosen.micro_batches(planner.world)?;
    Ok(Fitted { options: chosen, micro, notes })
}

/// Why nothing fits the device: the plan that needs least of those the options allow.
fn over_limit(planner: &Planner<'_>, options: &TrainOptions) -> Result<DoesNotFit, TrainError> {
    let limit = options.gpu_memory_limit.expect("without a limit everything fits");
    let micro = match options.micro_batch {
        Some(given) => Some(given),
        None => planner.micro_batches(options)?.last().copied(),
    };
    let fraction = options.offload_fraction.or(Some(1.0));
    let smallest = TrainOptions { micro_batch: micro, offload_fraction: fraction, ..options.clone() };
    let needed = |sketch: &Sketch| sketch.largest().device_bytes;
    let room = Room { limit, needed: &needed, places: &[Place::Device], turn_off: false };
    let needed = planner.device_bytes(&smallest)?;
    let what = format!("a rank needs {needed} of device memory, and --gpu-memory-limit allows {limit}");
    explain(planner, &smallest, what, &room)
}

/// Memory that is short.
pub(crate) struct Room<'a> {
    /// How much there is.
    pub(crate) limit: Bytes,
    /// How much a plan needs of it.
    pub(crate) needed: &'a dyn Fn(&Sketch) -> Bytes,
    /// Whose items are shown.
    pub(crate) places: &'a [Place],
    /// Turning offload off may help: it is the host's memory that is short.
    pub(crate) turn_off: bool,
}

/// What the rank that needs most would hold, and what would fit.
pub(crate) fn explain(
    planner: &Planner<'_>,
    options: &TrainOptions,
    what: String,
    room: &Room<'_>,
) -> Result<DoesNotFit, TrainError> {
    let (_, sketch) = planner.sketch(options)?;
    let bytes = |rank: &&RankPlan| -> Bytes {
        let arenas = [(Place::Device, rank.device_bytes), (Place::Host, rank.host_bytes)];
        arenas.into_iter().filter(|(place, _)| room.places.contains(place)).map(|(_, bytes)| bytes).sum()
    };
    let rank = sketch.stages.iter().max_by_key(bytes).expect("there is at least one stage");
    let mut items: Vec<MemoryItem> =
        memory_report(rank).into_iter().filter(|i| room.places.contains(&i.place)).collect();
    let table = items.iter().map(|i| format!("  {:<22} {:>12}\n", i.name, i.bytes.to_string())).collect();
    items.sort_by_key(|i| std::cmp::Reverse(i.bytes));
    let largest: Vec<String> = items.iter().take(3).map(|i| format!("{} {}", i.name, i.bytes)).collect();
    let mend = match smallest_change(planner, options, room)? {
        Some((words, needed)) => format!("it would fit with {words}: {needed}"),
        None => "no change of --micro-batch, --recompute, --zero or --offload makes it fit; use more ranks, a smaller model or \
                 a shorter --seq-len"
            .to_owned(),
    };
    Ok(DoesNotFit { what, table, largest: largest.join(", "), mend })
}

/// The change that fits with the fewest settings changed; of several, the one whose step is estimated to be the shortest.
fn smallest_change(
    planner: &Planner<'_>,
    options: &TrainOptions,
    room: &Room<'_>,
) -> Result<Option<(String, Bytes)>, TrainError> {
    let machine = machine(None, options, planner.world);
    let sets = changes(planner, options, room.turn_off)?;
    for size in 1..=SETTINGS {
        let mut best: Option<(f64, String, Bytes)> = None;
        for set in sets.iter().filter(|set| set.len() == size) {
            let mut changed = options.clone();
            set.iter().for_each(|change| change.apply(&mut changed));
            // A change that cannot be planned is no help.
            let Ok((spec, sketch)) = planner.sketch(&changed) else { continue };
            let needed = (room.needed)(&sketch);
            let over = |limit| sketch.largest().device_bytes > limit;
            if needed > room.limit || options.gpu_memory_limit.is_some_and(over) {
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
    Offload(Offload),
}

/// Settings that [`Change`] has.
const SETTINGS: usize = 4;

impl Change {
    fn words(&self) -> String {
        match self {
            Self::MicroBatch(n) => format!("--micro-batch {n}"),
            Self::Recompute(recompute) => format!("--recompute {}", recompute_name(*recompute)),
            Self::Zero(stage) => format!("--zero {stage}"),
            Self::Offload(what) => format!("--offload {}", spelled(*what)),
        }
    }

    fn apply(self, options: &mut TrainOptions) {
        match self {
            Self::MicroBatch(n) => options.micro_batch = Some(n),
            Self::Recompute(recompute) => options.recompute = recompute,
            Self::Zero(stage) => options.zero = stage,
            Self::Offload(what) => (options.offload, options.offload_via) = (what, Some(OffloadVia::Host)),
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
fn changes(planner: &Planner<'_>, options: &TrainOptions, turn_off: bool) -> Result<Vec<Vec<Change>>, TrainError> {
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
        match (options.offload, turn_off) {
            (Offload::None, false) => vec![Change::Offload(Offload::Optimizer)],
            (Offload::Optimizer, true) => vec![Change::Offload(Offload::None)],
            _ => Vec::new(),
        },
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
