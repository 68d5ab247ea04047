//! `plan --search`: the settings that give the shortest step, by estimate, of those that fit.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use gpurun_plan::{Bound, Machine, ModelSpec, OffloadVia, Recompute, estimate_sketch};
use gpurun_types::Bytes;
use serde::Serialize;

use crate::fit::{Planner, recompute_name};
use crate::offload;
use crate::options::{Offload, PipelineSchedule, TrainOptions, spelled};
use crate::train::{TrainError, plan_options};

/// A way to train, and what it costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Found {
    /// The settings as flags.
    pub(crate) flags: String,
    pub(crate) step_seconds: f64,
    pub(crate) tokens_per_second: f64,
    pub(crate) device_peak_bytes: Bytes,
    pub(crate) host_peak_bytes: Bytes,
}

/// Of all settings.
pub(crate) struct Best {
    /// The shortest step first, then the least memory.
    pub(crate) found: Vec<Found>,
    /// Settings there are, and how many of them were planned: the others cannot be among the best, or cannot fit.
    pub(crate) settings: usize,
    pub(crate) planned: usize,
}

/// The `most` plans of the shortest steps of those that fit the limit. Settings that the user gave stay; the others run over
/// all their values. They are planned in the order of what each takes at least, until no more can be among the best.
pub(crate) fn search(
    planner: &Planner<'_>,
    options: &TrainOptions,
    machine: &Machine,
    most: usize,
) -> Result<Best, TrainError> {
    let mut specs: BTreeMap<usize, ModelSpec> = BTreeMap::new();
    let mut bounded = Vec::new();
    for candidate in candidates(planner, options)? {
        // What cannot be planned or does not fit is not listed.
        let Ok(micro) = candidate.micro_batches(planner.world) else { continue };
        let spec = match specs.entry(micro.sequences) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(planner.spec(&candidate)?),
        };
        let plan = plan_options(&candidate, planner.world)?;
        let Ok(bound) = Bound::new(spec, &plan, machine) else { continue };
        if candidate.gpu_memory_limit.is_none_or(|limit| bound.device_bytes <= limit) {
            let open = candidate.offload_fraction.is_none();
            bounded.push((if open { bound.without_optimizer } else { bound.seconds }, candidate));
        }
    }
    bounded.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut best = Best { found: Vec::new(), settings: bounded.len(), planned: 0 };
    for (least, candidate) in bounded {
        if best.found.len() == most && best.found.last().is_some_and(|worst| least > worst.step_seconds) {
            break;
        }
        best.planned += 1;
        best.found.extend(found(planner, candidate, machine)?);
        let order = |a: &Found, b: &Found| a.step_seconds.total_cmp(&b.step_seconds);
        best.found.sort_by(|a, b| order(a, b).then(a.device_peak_bytes.cmp(&b.device_peak_bytes)));
        best.found.truncate(most);
    }
    Ok(best)
}

/// What the plan of a candidate takes, if it fits.
fn found(planner: &Planner<'_>, candidate: TrainOptions, machine: &Machine) -> Result<Option<Found>, TrainError> {
    let candidate = match (candidate.gpu_memory_limit, candidate.offload_fraction) {
        (Some(limit), None) => match offload::with_fraction(planner, candidate, limit)? {
            Some(candidate) => candidate,
            None => return Ok(None),
        },
        _ => candidate,
    };
    let Ok((spec, sketch)) = planner.sketch(&candidate) else { return Ok(None) };
    let device_peak_bytes = sketch.largest().device_bytes;
    if candidate.gpu_memory_limit.is_some_and(|limit| device_peak_bytes > limit) {
        return Ok(None);
    }
    let step_seconds = estimate_sketch(&sketch, &spec, machine);
    Ok(Some(Found {
        flags: flags(planner, &candidate)?,
        step_seconds,
        tokens_per_second: (candidate.global_batch * candidate.seq_len) as f64 / step_seconds,
        device_peak_bytes,
        host_peak_bytes: sketch.largest_on_host(),
    }))
}

fn candidates(planner: &Planner<'_>, options: &TrainOptions) -> Result<Vec<TrainOptions>, TrainError> {
    let free = |name: &str| !options.was_given(name);
    let stages = match free("pp") {
        true => (1..=planner.world).filter(|pp| planner.world.is_multiple_of(*pp)).collect(),
        false => vec![options.pp],
    };
    let (mut all, mut refused) = (Vec::new(), None);
    for pp in stages.into_iter().filter(|pp| *pp as usize <= planner.model.units.len()) {
        match staged(planner, &TrainOptions { pp, ..options.clone() }) {
            Ok(more) => all.extend(more),
            // So many replicas cannot share the step; fewer may.
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        Some(error) if all.is_empty() => Err(error),
        _ => Ok(all),
    }
}

/// The candidates with the stages of `options`.
fn staged(planner: &Planner<'_>, options: &TrainOptions) -> Result<Vec<TrainOptions>, TrainError> {
    let free = |name: &str| !options.was_given(name);
    let replicas = options.mesh(planner.world)?.dp;
    let zero = match (free("zero"), replicas) {
        (false, _) => vec![options.zero],
        // One replica has nothing to shard.
        (true, 1) => vec![0],
        (true, _) => vec![0, 1, 2, 3],
    };
    let recompute = match free("recompute") {
        true => vec![Recompute::None, Recompute::Selective, Recompute::Full],
        false => vec![options.recompute],
    };
    let offload = match free("offload") {
        true => vec![
            (Offload::None, None),
            (Offload::Optimizer, Some(OffloadVia::Host)),
            (Offload::Optimizer, Some(OffloadVia::Stream)),
        ],
        false => offload::candidates(options).into_iter().map(|o| (o.offload, o.offload_via)).collect(),
    };
    let micro_batch = match options.micro_batch {
        None => planner.micro_batches(options)?,
        Some(given) => vec![given],
    };
    let orders = orders(planner, options);
    let mut all = Vec::new();
    for &zero in &zero {
        for &recompute in &recompute {
            for &(offload, offload_via) in &offload {
                for &(pp_schedule, pp_chunks) in &orders {
                    all.extend(micro_batch.iter().map(|n| TrainOptions {
                        zero,
                        recompute,
                        offload,
                        offload_via,
                        pp_schedule,
                        pp_chunks,
                        micro_batch: Some(*n),
                        ..options.clone()
                    }));
                }
            }
        }
    }
    Ok(all)
}

/// Orders of a pipeline, each with its chunks a stage.
fn orders(planner: &Planner<'_>, options: &TrainOptions) -> Vec<(PipelineSchedule, u32)> {
    if options.pp == 1 {
        return vec![(options.pp_schedule, options.pp_chunks)];
    }
    // gpipe takes as long as 1f1b and holds more.
    let all = [
        (PipelineSchedule::OneFOneB, 1),
        (PipelineSchedule::Interleaved, 2),
        (PipelineSchedule::Interleaved, 4),
        (PipelineSchedule::ZeroBubble, 1),
        (PipelineSchedule::ZeroBubble, 2),
    ];
    let given = |name: &str| options.was_given(name);
    let mut kept: Vec<_> = all.into_iter().collect();
    if given("pp-schedule") {
        kept = match (given("pp-chunks"), options.pp_schedule) {
            (false, PipelineSchedule::Interleaved | PipelineSchedule::ZeroBubble) => {
                kept.into_iter().filter(|(schedule, _)| *schedule == options.pp_schedule).collect()
            }
            _ => vec![(options.pp_schedule, options.pp_chunks)],
        };
    }
    let units = planner.model.units.len();
    kept.retain(|(_, chunks)| (options.pp * chunks) as usize <= units);
    if options.pp_split.is_some() {
        kept.retain(|(schedule, chunks)| (*schedule, *chunks) == (options.pp_schedule, options.pp_chunks));
    }
    kept
}

fn flags(planner: &Planner<'_>, o: &TrainOptions) -> Result<String, TrainError> {
    let micro = o.micro_batches(planner.world)?;
    let mut text = if o.pp > 1 { format!("--pp {} ", o.pp) } else { String::new() };
    if o.pp > 1 && o.pp_schedule != PipelineSchedule::OneFOneB {
        text.push_str(&format!("--pp-schedule {} ", spelled(o.pp_schedule)));
        if o.pp_chunks > 1 {
            text.push_str(&format!("--pp-chunks {} ", o.pp_chunks));
        }
    }
    text.push_str(&format!(
        "--zero {} --recompute {} --micro-batch {}",
        o.zero,
        recompute_name(o.recompute),
        micro.sequences
    ));
    if o.offload == Offload::Optimizer {
        text.push_str(" --offload optimizer");
        if let Some(via) = o.offload_via {
            text.push_str(&format!(" --offload-via {}", offload::via_name(via)));
        }
        if let Some(fraction) = o.offload_fraction.filter(|f| *f < 1.0) {
            text.push_str(&format!(" --offload-fraction {fraction}"));
        }
    }
    Ok(text)
}
