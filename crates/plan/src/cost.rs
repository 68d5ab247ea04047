//! What a plan costs: bytes by name, elements sent.

use std::collections::BTreeMap;

use gpurun_types::{Bytes, Place};
use serde::{Deserialize, Serialize};

use crate::ir::{Buffer, Kind, Op, Program, RankPlan, Region};
use crate::memory::{ALIGN, lifetimes};

/// One line of a memory report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryItem {
    /// What the bytes are for.
    pub name: String,
    /// Where they are.
    pub place: Place,
    /// How many.
    pub bytes: Bytes,
}

impl Kind {
    /// Its line in a memory report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Master => "master weights",
            Self::MomentM => "Adam m",
            Self::MomentV => "Adam v",
            Self::Activations => "activations",
            Self::Logits => "logits",
            Self::Communication => "communication",
            Self::Workspace => "workspace",
            Self::Batch => "batch",
            Self::Scalars => "scalars",
        }
    }
}

pub(crate) fn size(buffer: &Buffer) -> u64 {
    buffer.bytes().align_up(ALIGN).0
}

/// A rank's memory by name, with the transient buffers that are alive when most bytes are. Sums to the arenas' sizes.
#[must_use]
pub fn memory_report(plan: &RankPlan) -> Vec<MemoryItem> {
    let mut items = Vec::new();
    for (place, arena) in [(Place::Device, plan.device_bytes), (Place::Host, plan.host_bytes)] {
        let mut by_kind: BTreeMap<Kind, u64> = BTreeMap::new();
        for buffer in plan.buffers.iter().filter(|b| b.place == place && b.persistent) {
            *by_kind.entry(buffer.kind).or_default() += size(buffer);
        }
        let peaks = [&plan.train, &plan.evaluate].map(|program| peak(plan, program, place));
        let highest = peaks.into_iter().max_by_key(|alive| alive.values().sum::<u64>()).unwrap_or_default();
        for (kind, bytes) in highest {
            *by_kind.entry(kind).or_default() += bytes;
        }
        let named: u64 = by_kind.values().sum();
        let lines = by_kind.into_iter().map(|(kind, bytes)| (kind.name(), bytes));
        let gaps = Some(("gaps between buffers", arena.0 - named)).filter(|g| g.1 > 0);
        items.extend(lines.chain(gaps).map(|(name, bytes)| MemoryItem {
            name: name.to_owned(),
            place,
            bytes: Bytes(bytes),
        }));
    }
    items
}

/// Bytes by kind of the transient buffers that are alive when most are.
fn peak(plan: &RankPlan, program: &Program, place: Place) -> BTreeMap<Kind, u64> {
    let lives = lifetimes(plan.buffers.len(), program);
    let mut changes: Vec<Vec<(Kind, i64)>> = vec![Vec::new(); program.instrs.len() + 1];
    for (buffer, life) in plan.buffers.iter().zip(lives) {
        if let (Some(life), true) = (life, buffer.place == place && !buffer.persistent) {
            changes[*life.start() as usize].push((buffer.kind, size(buffer) as i64));
            changes[*life.end() as usize + 1].push((buffer.kind, -(size(buffer) as i64)));
        }
    }
    let (mut now, mut best): (BTreeMap<Kind, i64>, BTreeMap<Kind, i64>) = Default::default();
    for change in changes {
        for (kind, bytes) in change {
            *now.entry(kind).or_default() += bytes;
        }
        if now.values().sum::<i64>() > best.values().sum::<i64>() {
            best.clone_from(&now);
        }
    }
    best.into_iter().filter(|(_, b)| *b > 0).map(|(kind, b)| (kind, b as u64)).collect()
}

/// Bytes of a checkpoint that this rank writes: master weights and both moments of its own shards, each in its type.
#[must_use]
pub fn checkpoint_bytes(plan: &RankPlan, dp: u32) -> Bytes {
    let size = |region: Region| plan.buffers[region.buffer.0 as usize].dtype.size();
    let share = |home: &crate::ir::UnitHome| {
        let state: usize = [home.master.0, home.m, home.v].into_iter().map(size).sum();
        (home.layout.elements.div_ceil(dp as usize) * state) as u64
    };
    Bytes(plan.homes.iter().map(share).sum())
}

/// Collectives of one training step, as one rank sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveVolume {
    /// Collectives.
    pub count: u64,
    /// Elements that a rank sends (and receives): `(n - 1) / n` of each collective's whole buffer.
    pub elements: u64,
}

/// Collectives over units' weights and gradients in one training step (norms and losses are left out: a few hundred bytes).
#[must_use]
pub fn collective_volume(plan: &RankPlan) -> CollectiveVolume {
    let mut volume = CollectiveVolume::default();
    for instr in &plan.train.instrs {
        let (whole, shard) = match &instr.op {
            Op::AllGather { unit: Some(_), src, dst, .. } => (dst.len, src.len),
            Op::ReduceScatter { src, dst, .. } => (src.len, dst.len),
            _ => continue,
        };
        volume.count += 1;
        volume.elements += (whole - shard) as u64;
    }
    volume
}
