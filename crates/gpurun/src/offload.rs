//! Where Adam's state is and who steps it, where the options leave that to the program.

use gpurun_plan::{Machine, OffloadVia};
use gpurun_types::Bytes;

use crate::fit::Planner;
use crate::options::{Offload, TrainOptions};
use crate::train::{TrainError, plan_options};

/// The machine's rates, and where they are from, for a run that keeps so many bytes in host memory.
pub(crate) type Rates<'a> = &'a dyn Fn(Bytes) -> Result<(Machine, String), TrainError>;

/// The name that the command line has for it.
pub(crate) const fn via_name(via: OffloadVia) -> &'static str {
    match via {
        OffloadVia::Host => "host",
        OffloadVia::Stream => "stream",
    }
}

/// The options with everybody who could step Adam's state.
pub(crate) fn candidates(options: &TrainOptions) -> Vec<TrainOptions> {
    match (options.offload, options.offload_via) {
        (Offload::Optimizer, None) => [OffloadVia::Host, OffloadVia::Stream]
            .map(|via| TrainOptions { offload_via: Some(via), ..options.clone() })
            .to_vec(),
        _ => vec![options.clone()],
    }
}

/// Of options that fit, those of the shortest estimated step, and a line that says why.
pub(crate) fn faster(
    planner: &Planner<'_>,
    mut fitting: Vec<TrainOptions>,
    rates: Rates<'_>,
) -> Result<(TrainOptions, Vec<String>), TrainError> {
    let mut on_host = Bytes(0);
    for options in &fitting {
        on_host = on_host.max(planner.sketch(options)?.1.largest_on_host());
    }
    // One is all that was asked for or fits, or the device has room for all state.
    if fitting.len() == 1 || on_host == Bytes(0) {
        return Ok((fitting.swap_remove(0), Vec::new()));
    }
    let (machine, from) = rates(on_host)?;
    let mut timed = Vec::new();
    for options in fitting {
        timed.push((planner.seconds(&options, &machine)?, options));
    }
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    let via = |options: &TrainOptions| options.offload_via.map_or("", via_name);
    let others: Vec<String> = timed[1..].iter().map(|(s, o)| format!("{} {s:.4} s", via(o))).collect();
    let (seconds, chosen) = timed.swap_remove(0);
    let line = format!(
        "--offload-via {}: a step is estimated at {seconds:.4} s, with {}; {from}",
        via(&chosen),
        others.join(", with ")
    );
    Ok((chosen, vec![line]))
}

/// The options with the least share of state on the host that fits `limit`, where that is left open; `None` when none does.
pub(crate) fn with_fraction(
    planner: &Planner<'_>,
    options: TrainOptions,
    limit: Bytes,
) -> Result<Option<TrainOptions>, TrainError> {
    let fits = |fraction: f64| -> Result<Option<TrainOptions>, TrainError> {
        let changed = TrainOptions { offload_fraction: Some(fraction), ..options.clone() };
        Ok((planner.device_bytes(&changed)? <= limit).then_some(changed))
    };
    if let Some(given) = options.offload_fraction {
        return fits(given);
    }
    if let Some(none) = fits(0.0)? {
        return Ok(Some(none));
    }
    let Some(mut best) = fits(1.0)? else { return Ok(None) };
    // The more units' state is on the host, the less is on the device: between too few and enough, halve.
    let units = planner.sketch(&best)?.1.most_units();
    let (mut too_few, mut enough) = (0, units);
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        match fits(middle as f64 / units as f64)? {
            Some(options) => (best, enough) = (options, middle),
            None => too_few = middle,
        }
    }
    Ok(Some(best))
}

/// A line that says what share was chosen, where it was left open.
pub(crate) fn explain_fraction(
    planner: &Planner<'_>,
    asked: &TrainOptions,
    chosen: &TrainOptions,
) -> Result<Option<String>, TrainError> {
    let (None, Some(fraction), Some(limit)) = (asked.offload_fraction, chosen.offload_fraction, asked.gpu_memory_limit)
    else {
        return Ok(None);
    };
    let plan = plan_options(chosen, planner.world)?;
    let (_, sketch) = planner.sketch(chosen)?;
    let count: usize = sketch.stages.iter().map(|stage| plan.units_on_host(stage.homes.len())).sum();
    let units: usize = sketch.stages.iter().map(|stage| stage.homes.len()).sum();
    let device = sketch.largest().device_bytes;
    Ok(Some(format!(
        "--offload-fraction {fraction:.3}: the optimizer state of {count} of {units} units is in host memory; a rank's device \
         memory is then {device} of the {limit} allowed"
    )))
}
