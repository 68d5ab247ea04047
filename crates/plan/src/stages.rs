//! Which units each stage of a pipeline has.

use std::ops::Range;

use crate::spec::{ModelSpec, UnitId, UnitSpec};

/// Floating-point operations of a unit in a step: a backward takes twice a forward, and the loss unit does both in one.
fn cost(unit: &UnitSpec) -> f64 {
    3.0 * unit.forward_flops
}

/// Consecutive units for each of `stages` stages, so that the slowest stage is as fast as can be; of equal splits the one
/// whose first stages are the fullest. Every stage has at least one unit: `stages` is at most the number of units.
pub(crate) fn split(spec: &ModelSpec, stages: u32) -> Vec<Range<u32>> {
    let (units, stages) = (spec.units.len(), stages as usize);
    let mut before = vec![0.0];
    for unit in &spec.units {
        before.push(before[before.len() - 1] + cost(unit));
    }
    // least[s][u]: the slowest of `s + 1` stages that hold the units from `u` on; cut[s][u]: where the first of them ends.
    let mut least = vec![vec![f64::INFINITY; units + 1]; stages];
    let mut cut = vec![vec![units; units + 1]; stages];
    for from in 0..units {
        least[0][from] = before[units] - before[from];
    }
    for s in 1..stages {
        for from in 0..units {
            for to in from + 1..units {
                let slowest = (before[to] - before[from]).max(least[s - 1][to]);
                if slowest <= least[s][from] {
                    (least[s][from], cut[s][from]) = (slowest, to);
                }
            }
        }
    }
    let mut from = 0;
    let mut out = Vec::with_capacity(stages);
    for s in (0..stages).rev() {
        let to = cut[s][from];
        out.push(from as u32..to as u32);
        from = to;
    }
    out
}

/// The stage that owns a unit.
pub(crate) fn stage_of(split: &[Range<u32>], unit: UnitId) -> u32 {
    split.iter().position(|range| range.contains(&unit.0)).expect("every unit has a stage") as u32
}
