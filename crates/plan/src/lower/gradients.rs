//! Gradients: whole fp32 buffers that backwards add to, and their reduction over replicas.
//!
//! A buffer lives from the first backward that touches it to the last: one that other units borrow from is reduced once,
//! after its last use, so that every stage adds the same numbers in the same order.

use std::collections::BTreeMap;

use gpurun_types::{DType, Lane, Place};

use super::tied;
use crate::build::Builder;
use crate::ir::{Group, Kind, NormPart, Op, Region};
use crate::spec::{Micro, UnitId};
use crate::steps::Step;

/// The life of one whole gradient buffer.
#[derive(Clone, Copy)]
struct Life {
    unit: UnitId,
    /// The micro-batch that it is of; 0 where one buffer is for the whole step.
    micro: u32,
    first: usize,
    last: usize,
    /// Adds to the shard of earlier micro-batches.
    accumulate: bool,
}

/// Gradient buffers of a training step.
pub(crate) struct Gradients {
    /// By the step that touches a buffer first, and by the one that touches it last.
    starting: BTreeMap<usize, Vec<Life>>,
    ending: BTreeMap<usize, Vec<Life>>,
    /// With the gradients of weights computed apart, those of several micro-batches may be under way.
    whole: BTreeMap<(u32, UnitId), Region>,
    per_micro: bool,
    /// This rank's shard of each unit's summed gradient, once reduced.
    shards: BTreeMap<UnitId, Region>,
    /// Reductions that wait in the list behind the next backward, so that both buffers are alive together and the
    /// reduction can run beside that backward.
    pending: Vec<(Life, Region)>,
}

impl Gradients {
    pub(crate) fn none() -> Self {
        Self {
            starting: BTreeMap::new(),
            ending: BTreeMap::new(),
            whole: BTreeMap::new(),
            per_micro: false,
            shards: BTreeMap::new(),
            pending: Vec::new(),
        }
    }

    pub(crate) fn new(b: &Builder<'_>, steps: &[Step]) -> Self {
        // With shards, one buffer a micro-batch; without, one for the whole step.
        let per_micro = b.shards_grads();
        let mut lives: BTreeMap<(u32, UnitId), Life> = BTreeMap::new();
        for (index, step) in steps.iter().enumerate() {
            let Step::Backward { unit, micro, .. } = step else { continue };
            for unit in std::iter::once(*unit).chain(b.spec.units[unit.0 as usize].borrows.iter().copied()) {
                let micro = if per_micro { micro.0 } else { 0 };
                let new = Life { unit, micro, first: index, last: index, accumulate: micro > 0 };
                let life = lives.entry((micro, unit)).or_insert(new);
                life.last = index;
            }
        }
        let mut all = Self { per_micro, ..Self::none() };
        for life in lives.into_values() {
            all.starting.entry(life.first).or_default().push(life);
            all.ending.entry(life.last).or_default().push(life);
        }
        all
    }

    /// Whole gradients of a backward: own, then borrowed.
    pub(crate) fn of(&self, b: &Builder<'_>, unit: UnitId, micro: Micro) -> Vec<Region> {
        let micro = if self.per_micro { micro.0 } else { 0 };
        let touched = std::iter::once(unit).chain(b.spec.units[unit.0 as usize].borrows.iter().copied());
        touched.map(|u| self.whole[&(micro, u)]).collect()
    }

    /// Zeroed buffers for those that the step at `index` touches first.
    pub(crate) fn before(&mut self, b: &mut Builder<'_>, index: usize) {
        for life in self.starting.remove(&index).unwrap_or_default() {
            let name = format!("{}/gradients", b.spec.units[life.unit.0 as usize].name);
            let elements = b.layout(life.unit).padded;
            let region = b.transient(name, Kind::Gradients, Place::Device, elements, DType::F32);
            b.emit(Lane::Compute, Op::Zero { dst: region });
            self.whole.insert((life.micro, life.unit), region);
        }
    }

    /// After a backward: reduces what the one before it finished.
    pub(crate) fn after(&mut self, b: &mut Builder<'_>, index: usize) {
        self.reduce_pending(b);
        let done = self.ending.remove(&index).unwrap_or_default();
        self.pending.extend(done.into_iter().map(|life| (life, self.whole[&(life.micro, life.unit)])));
    }

    fn reduce_pending(&mut self, b: &mut Builder<'_>) {
        for (life, whole) in std::mem::take(&mut self.pending) {
            let layout = b.layout(life.unit);
            let shard = if b.shards_grads() {
                *self.shards.entry(life.unit).or_insert_with(|| {
                    let name = format!("{}/gradient shard", b.spec.units[life.unit.0 as usize].name);
                    // Persistent, so that it shares bytes with nothing: a reduction then waits for its gradient only.
                    b.persistent(name, Kind::Gradients, Place::Device, layout.shard, DType::F32)
                })
            } else {
                let own = if b.dp > 1 { b.own_shard(whole, layout) } else { whole };
                self.shards.insert(life.unit, own);
                own
            };
            if b.dp > 1 {
                let Life { unit, accumulate, .. } = life;
                b.emit(
                    Lane::Reduce,
                    Op::ReduceScatter { unit, group: Group::Data, src: whole, dst: shard, accumulate },
                );
            }
        }
    }

    /// After the last backward: norms of the shards, and the decisions of the step.
    pub(crate) fn finish(&mut self, b: &mut Builder<'_>) {
        self.reduce_pending(b);
        tied::add(b, &self.shards);
        let row = b.row();
        let parts = b.units.clone().into_iter().map(|unit| {
            let start = b.partials.start + b.row_index() * row + unit.0 as usize;
            NormPart { unit, src: self.shards[&unit], dst: Region { start, len: 1, ..b.partials } }
        });
        b.emit(Lane::Compute, Op::Norm { parts: parts.collect() });
        b.gather_scalars(b.partials, row);
        let (partials, learning_rate, scalars) = (b.partials, b.learning_rate, b.scalars);
        let units = b.spec.units.len();
        b.emit(Lane::Compute, Op::Scalars { partials, row, units, learning_rate, scalars });
    }

    /// The gradient that Adam reads: the shard, or the whole with replicated optimizer state, gathered from the shards.
    pub(crate) fn for_adam(&self, b: &mut Builder<'_>, unit: UnitId) -> Region {
        if b.shards_optim() || b.dp == 1 {
            return self.shards[&unit];
        }
        let (src, dst) = (self.shards[&unit], self.whole[&(0, unit)]);
        b.emit(Lane::Reduce, Op::AllGather { unit: Some(unit), group: Group::Data, src, dst });
        dst
    }
}
