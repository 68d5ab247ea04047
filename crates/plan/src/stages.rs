//! Which units each chunk of a pipeline has, and which stage each chunk.

use std::ops::Range;

use crate::error::PlanError;
use crate::spec::{ModelSpec, PlanOptions, Recompute, UnitId, UnitSpec};

/// A stretch of the chain, on one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Counted along the chain.
    pub(crate) index: u32,
    pub(crate) stage: u32,
    pub(crate) units: Range<u32>,
}

/// All chunks, along the chain.
pub(crate) struct Placement {
    pub(crate) stages: u32,
    pub(crate) chunks: Vec<Chunk>,
}

impl Placement {
    /// As `options.split` says, or balanced.
    pub(crate) fn new(spec: &ModelSpec, options: &PlanOptions) -> Result<Self, PlanError> {
        let (stages, schedule) = (options.mesh.pp, options.schedule);
        let chunks = stages * schedule.chunks();
        let ranges = match &options.split {
            Some(given) => as_given(given, chunks, spec.units.len() as u32)?,
            None => balanced(spec, options.recompute, chunks as usize),
        };
        let chunk = |(index, units)| Chunk { index, stage: schedule.stage_of(index, stages), units };
        Ok(Self { stages, chunks: (0..).zip(ranges).map(chunk).collect() })
    }

    /// The stage that owns a unit.
    pub(crate) fn stage_of(&self, unit: UnitId) -> u32 {
        let chunk = self.chunks.iter().find(|chunk| chunk.units.contains(&unit.0));
        chunk.expect("every unit has a chunk").stage
    }

    /// Chunks of a stage, along the chain.
    pub(crate) fn of_stage(&self, stage: u32) -> impl Iterator<Item = &Chunk> {
        self.chunks.iter().filter(move |chunk| chunk.stage == stage)
    }

    /// Units of a stage, along the chain.
    pub(crate) fn units_of(&self, stage: u32) -> Vec<UnitId> {
        self.of_stage(stage).flat_map(|chunk| chunk.units.clone()).map(UnitId).collect()
    }
}

/// Numbers of units for each chunk, or of layers: units without the first and the last.
fn as_given(given: &[u32], chunks: u32, units: u32) -> Result<Vec<Range<u32>>, PlanError> {
    let numbers = given.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let wrong = |second: String, problem: String| {
        Err(PlanError::Together { first: format!("pp-split {numbers}"), second, problem })
    };
    if given.len() != chunks as usize {
        let problem = format!("{} numbers; give one for each, in their order", given.len());
        return wrong(format!("{chunks} chunks of layers"), problem);
    }
    let sum: u64 = given.iter().map(|n| u64::from(*n)).sum();
    let layers = u64::from(units) - 2;
    let model = || format!("a model of {units} units");
    let mut counts = given.to_vec();
    if sum == layers {
        counts[0] += 1;
        counts[given.len() - 1] += 1;
    } else if sum != u64::from(units) {
        let problem = format!(
            "the numbers sum to {sum}; the model has {layers} layers, or {units} units with embedding and head"
        );
        return wrong(model(), problem);
    }
    if let Some(empty) = counts.iter().position(|n| *n == 0) {
        let problem = format!("chunk {empty} gets nothing; each needs a layer, the first embedding or the head");
        return wrong(model(), problem);
    }
    let mut from = 0;
    let range = |n: u32| {
        from += n;
        from - n..from
    };
    Ok(counts.into_iter().map(range).collect())
}

/// Floating-point operations that take as long as a byte of device memory takes to move, about, on GPUs since 2020.
const FLOPS_A_BYTE: f64 = 140.0;

/// Cost of a unit in a step, in floating-point operations: a backward takes twice a forward, the loss unit does both in one,
/// and what is recomputed is added. A unit of few operations (an embedding) still moves its edges.
fn cost(unit: &UnitSpec, recompute: Recompute, inner: bool) -> f64 {
    let again = match recompute {
        Recompute::None => 0.0,
        Recompute::Selective => unit.restore_flops,
        Recompute::Full if inner => unit.forward_flops,
        Recompute::Full => 0.0,
    };
    let edges = 2.0 * (unit.input + unit.output) as f64;
    3.0 * unit.forward_flops + again + 3.0 * FLOPS_A_BYTE * edges
}

/// Consecutive units for each of `chunks` chunks, so that the slowest chunk is as fast as can be; of equal splits the one
/// whose first chunks are the fullest. Every chunk has at least one unit: `chunks` is at most the number of units.
fn balanced(spec: &ModelSpec, recompute: Recompute, chunks: usize) -> Vec<Range<u32>> {
    let units = spec.units.len();
    let mut before = vec![0.0];
    for (index, unit) in spec.units.iter().enumerate() {
        let inner = index > 0 && index + 1 < units;
        before.push(before[before.len() - 1] + cost(unit, recompute, inner));
    }
    // least[s][u]: the slowest of `s + 1` chunks that hold the units from `u` on; cut[s][u]: where the first of them ends.
    let mut least = vec![vec![f64::INFINITY; units + 1]; chunks];
    let mut cut = vec![vec![units; units + 1]; chunks];
    for from in 0..units {
        least[0][from] = before[units] - before[from];
    }
    for s in 1..chunks {
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
    let mut out = Vec::with_capacity(chunks);
    for s in (0..chunks).rev() {
        let to = cut[s][from];
        out.push(from as u32..to as u32);
        from = to;
    }
    out
}
