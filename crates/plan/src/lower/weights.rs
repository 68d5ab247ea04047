//! Weights of each pass: persistent, or gathered one pass ahead from shards.

use std::collections::BTreeMap;

use gpurun_types::{Lane, Place};

use crate::build::Builder;
use crate::ir::{Group, Kind, Op, Region};
use crate::spec::UnitId;
use crate::steps::Step;

/// Passes that follow each other and need the same weights: a recompute and its backward.
struct Stretch {
    /// Indices of the first and last step.
    first: usize,
    last: usize,
    /// Whose weights: the passes' own unit first.
    units: Vec<UnitId>,
}

/// Weights in whole, by stretch of passes.
pub(crate) struct Gathers {
    stretches: Vec<Stretch>,
    /// Next stretch to gather for.
    next: usize,
    /// By last step of the stretch, and unit.
    ready: BTreeMap<(usize, UnitId), Region>,
    sharded: bool,
}

impl Gathers {
    pub(crate) fn new(b: &Builder<'_>, steps: &[Step]) -> Self {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (index, units) in steps.iter().enumerate().filter_map(|(i, s)| Some((i, needs(b, *s)?))) {
            match stretches.last_mut() {
                Some(last) if last.units == units => last.last = index,
                _ => stretches.push(Stretch { first: index, last: index, units }),
            }
        }
        Self { stretches, next: 0, ready: BTreeMap::new(), sharded: b.shards_params() }
    }

    /// Weights of the pass at `index`: own, then borrowed.
    pub(crate) fn weights(&self, b: &Builder<'_>, index: usize, unit: UnitId) -> Vec<Region> {
        let needed = std::iter::once(unit).chain(b.spec.units[unit.0 as usize].borrows.iter().copied());
        if self.sharded {
            let last = self.stretches[self.stretch(index)].last;
            needed.map(|u| self.ready[&(last, u)]).collect()
        } else {
            needed.map(|u| b.weights[u.0 as usize]).collect()
        }
    }

    /// The stretch that the step at `index` is in.
    fn stretch(&self, index: usize) -> usize {
        self.stretches.partition_point(|s| s.last < index)
    }

    /// Before the step at `index`: its own weights, if it is the first pass, and those of the stretch after it. Gathers of
    /// the next stretch stand in the list before this one, so both are alive together: two slots.
    pub(crate) fn before(&mut self, b: &mut Builder<'_>, steps: &[Step], index: usize) {
        if self.sharded && needs(b, steps[index]).is_some() {
            let ahead = self.stretches.get(self.stretch(index) + 1).map_or(index, |s| s.first);
            self.up_to(b, ahead);
        }
    }

    /// The weights of the stretch that the step at `index` ends are not needed any more.
    pub(crate) fn after(&mut self, index: usize) {
        self.ready.retain(|(last, _), _| *last != index);
    }

    fn up_to(&mut self, b: &mut Builder<'_>, index: usize) {
        while let Some(stretch) = self.stretches.get(self.next).filter(|s| s.first <= index) {
            let pass = stretch.last;
            for unit in stretch.units.clone() {
                let layout = b.layout(unit);
                let name = format!("{}/gathered weights", b.spec.units[unit.0 as usize].name);
                let dst = b.transient(name, Kind::Communication, Place::Device, layout.padded, b.options.dtype);
                let src = b.weights[unit.0 as usize];
                b.emit(Lane::Gather, Op::AllGather { unit: Some(unit), group: Group::Data, src, dst });
                self.ready.insert((pass, unit), dst);
            }
            self.next += 1;
        }
    }
}

/// Units whose weights a step needs: its own, then the borrowed ones.
fn needs(b: &Builder<'_>, step: Step) -> Option<Vec<UnitId>> {
    let unit = match step {
        Step::Load(_) | Step::Receive { .. } | Step::Send { .. } => return None,
        Step::Forward { unit, .. } | Step::Restore { unit, .. } | Step::Backward { unit, .. } => unit,
    };
    Some(std::iter::once(unit).chain(b.spec.units[unit.0 as usize].borrows.iter().copied()).collect())
}
