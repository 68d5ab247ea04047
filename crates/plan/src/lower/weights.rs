//! Weights of each pass: persistent, or gathered one pass ahead from shards.

use std::collections::BTreeMap;

use gpurun_types::{Lane, Place};

use crate::build::Builder;
use crate::ir::{Group, Kind, Op, Region};
use crate::spec::UnitId;
use crate::steps::Step;

/// Weights in whole, by pass (index of the step) and unit.
pub(crate) struct Gathers {
    /// Passes in order: index of the step, and the units whose weights it needs (its own first).
    passes: Vec<(usize, Vec<UnitId>)>,
    /// Next pass to gather for.
    next: usize,
    ready: BTreeMap<(usize, UnitId), Region>,
    sharded: bool,
}

impl Gathers {
    pub(crate) fn new(b: &Builder<'_>, steps: &[Step]) -> Self {
        let passes = steps.iter().enumerate().filter_map(|(i, s)| Some((i, needs(b, *s)?))).collect();
        Self { passes, next: 0, ready: BTreeMap::new(), sharded: b.shards_params() }
    }

    /// Weights of the pass at `index`: own, then borrowed.
    pub(crate) fn weights(&self, b: &Builder<'_>, index: usize, unit: UnitId) -> Vec<Region> {
        let needed = std::iter::once(unit).chain(b.spec.units[unit.0 as usize].borrows.iter().copied());
        if self.sharded {
            needed.map(|u| self.ready[&(index, u)]).collect()
        } else {
            needed.map(|u| b.weights[u.0 as usize]).collect()
        }
    }

    /// Before the step at `index`: its own weights, if it is the first pass, and those of the pass after it. Gathers of
    /// the next pass stand in the list before this pass, so both are alive together: two slots.
    pub(crate) fn before(&mut self, b: &mut Builder<'_>, steps: &[Step], index: usize) {
        if self.sharded && needs(b, steps[index]).is_some() {
            self.up_to(b, index);
            if let Some((ahead, _)) = self.passes.get(self.next) {
                self.up_to(b, *ahead);
            }
        }
    }

    /// The weights of the step at `index` are not needed any more.
    pub(crate) fn after(&mut self, index: usize) {
        self.ready.retain(|(pass, _), _| *pass != index);
    }

    fn up_to(&mut self, b: &mut Builder<'_>, index: usize) {
        while let Some((pass, units)) = self.passes.get(self.next).cloned().filter(|(pass, _)| *pass <= index) {
            for unit in units {
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
        Step::Load(_) => return None,
        Step::Forward { unit, .. } | Step::Backward { unit, .. } => unit,
    };
    Some(std::iter::once(unit).chain(b.spec.units[unit.0 as usize].borrows.iter().copied()).collect())
}
