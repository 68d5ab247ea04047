//! `plan --search`: the settings that give the shortest step, by estimate, of those that fit.

use gpurun_plan::{Machine, OffloadVia, Recompute, estimate_sketch};
use gpurun_types::Bytes;
use serde::Serialize;

use crate::fit::{Planner, recompute_name};
use crate::offload;
use crate::options::{Offload, TrainOptions};
use crate::train::TrainError;

/// A way to train, and what it costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Found {
    /// The settings as flags.
    pub(crate) flags: String,
    pub(crate) step_seconds: f64,
    pub(crate) tokens_per_second: f64,
    pub(crate) device_peak_bytes: Bytes,
    pub(crate) host_peak_bytes: Bytes,
    #[serde(skip)]
    pub(crate) options: TrainOptions,
}

/// Every plan that fits the limit, the shortest step first, then the least memory. Settings that the user gave stay; the
/// others run over all their values.
pub(crate) fn search(
    planner: &Planner<'_>,
    options: &TrainOptions,
    machine: &Machine,
) -> Result<Vec<Found>, TrainError> {
    let mut found = Vec::new();
    for candidate in candidates(planner, options)? {
        // What cannot be planned or does not fit is not listed.
        let Ok(Some(candidate)) = planner.within(&candidate) else { continue };
        let Ok((spec, sketch)) = planner.sketch(&candidate) else { continue };
        let device_peak_bytes = sketch.largest().device_bytes;
        let step_seconds = estimate_sketch(&sketch, &spec, machine);
        found.push(Found {
            flags: flags(planner, &candidate)?,
            step_seconds,
            tokens_per_second: (candidate.global_batch * candidate.seq_len) as f64 / step_seconds,
            device_peak_bytes,
            host_peak_bytes: sketch.largest_on_host(),
            options: candidate,
        });
    }
    found.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds).then(a.device_peak_bytes.cmp(&b.device_peak_bytes)));
    Ok(found)
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
    let mut all = Vec::new();
    for &zero in &zero {
        for &recompute in &recompute {
            for &(offload, offload_via) in &offload {
                all.extend(micro_batch.iter().map(|n| TrainOptions {
                    zero,
                    recompute,
                    offload,
                    offload_via,
                    micro_batch: Some(*n),
                    ..options.clone()
                }));
            }
        }
    }
    Ok(all)
}

fn flags(planner: &Planner<'_>, o: &TrainOptions) -> Result<String, TrainError> {
    let micro = o.micro_batches(planner.world)?;
    let mut text = if o.pp > 1 { format!("--pp {} ", o.pp) } else { String::new() };
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
