//! Where parameters lie in the flat buffers of their units.

use gpurun_model::Model;
use gpurun_plan::{ModelSpec, param_starts};

use crate::describe::Owners;

/// Where a unit's parameters lie in flat buffers.
pub(super) struct UnitParams {
    /// Start and length of each own parameter, and whether it decays.
    pub own: Vec<(usize, usize, bool)>,
    /// For each borrowed parameter: which borrowed unit (its place in `UnitSpec::borrows`), start, length.
    pub borrowed: Vec<(usize, usize, usize)>,
}

pub(super) fn unit_params(model: &Model, spec: &ModelSpec) -> Vec<UnitParams> {
    let owners = Owners::of(model);
    let starts: Vec<Vec<usize>> =
        spec.units.iter().map(|u| param_starts(u.params.iter().map(|p| p.elements)).0).collect();
    let own = |unit: usize, param: usize| (starts[unit][param], spec.units[unit].params[param].elements);
    model
        .units
        .iter()
        .enumerate()
        .map(|(index, unit)| UnitParams {
            own: spec.units[index]
                .params
                .iter()
                .enumerate()
                .map(|(position, p)| {
                    let (start, len) = own(index, position);
                    (start, len, p.decay)
                })
                .collect(),
            borrowed: unit
                .borrows()
                .iter()
                .map(|name| {
                    let (owner, position) = owners.find(name).expect("model_spec checked the borrows");
                    let which = spec.units[index].borrows.iter().position(|b| *b == owner);
                    let (start, len) = own(owner.0 as usize, position);
                    (which.expect("model_spec lists every owner"), start, len)
                })
                .collect(),
        })
        .collect()
}

/// Stretches of `first..end` of a flat buffer whose parameters share one decay, neighbours merged. Gaps between
/// parameters hold zeros and stay zero, so a stretch may run over them.
pub(super) fn decay_runs(params: &[(usize, usize, bool)], first: usize, end: usize) -> Vec<(usize, usize, bool)> {
    let mut runs: Vec<(usize, usize, bool)> = Vec::new();
    for &(start, len, decay) in params {
        let (start, stop) = (start.max(first), (start + len).min(end));
        if start >= stop {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.2 == decay => last.1 = stop,
            _ => runs.push((start, stop, decay)),
        }
    }
    runs
}
