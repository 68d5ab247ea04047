//! Four ranks in every composition: stages and replicas, ZeRO stages, places of Adam's state, recompute, micro-batches.
//!
//! All of the grid is run. The schedules take turns over it: there are five, and five divides no product of the grid's sides, so
//! every schedule meets every value of every setting, and most pairs of them.

mod common;

use std::collections::BTreeMap;

use common::{Case, assert_near, assert_same_bits, gpt2, llama};
use gpurun_model::ModelConfig;
use gpurun_plan::{OffloadVia, Recompute, Schedule};

const SCHEDULES: [Schedule; 5] = [
    Schedule::OneFOneB,
    Schedule::Gpipe,
    Schedule::Interleaved { chunks: 2 },
    Schedule::ZeroBubble,
    Schedule::ZeroBubbleV,
];

/// Every composition of `model`, and the run that it must be like: its replicas alone, with nothing else.
fn grid(model: &ModelConfig) -> Vec<(Case, Case)> {
    let mut all = Vec::new();
    for (pp, ranks) in [(2, 2), (4, 1)] {
        for stage in 0..=3 {
            for offload in [None, Some(OffloadVia::Host), Some(OffloadVia::Stream)] {
                for recompute in [Recompute::None, Recompute::Full] {
                    for micro_batches in [1, 2, 4, 7] {
                        let global_batch = (ranks * micro_batches) as usize;
                        let plain = Case::plain(model.clone());
                        let alone = Case { ranks, stage, micro_batches, global_batch, steps: 2, ..plain };
                        let schedule = SCHEDULES[all.len() % SCHEDULES.len()];
                        all.push((Case { pp, schedule, offload, recompute, ..alone.clone() }, alone));
                    }
                }
            }
        }
    }
    all
}

#[test]
fn every_composition_of_four_ranks_gives_the_bits_of_its_replicas_alone() {
    let _limit = testkit::time_limit(240);
    let mut known = BTreeMap::new();
    for (case, alone) in grid(&ModelConfig { layers: 6, ..llama() }) {
        let key = (alone.ranks, alone.stage, alone.micro_batches);
        let want = known.entry(key).or_insert_with(|| alone.run());
        assert_same_bits(&case.run(), want, &format!("{case:?}"));
    }
}

#[test]
fn every_composition_of_a_tied_table_gives_it_within_rounding() {
    let _limit = testkit::time_limit(240);
    let mut known = BTreeMap::new();
    // Every seventh: seven divides no product of the sides either.
    for (case, alone) in grid(&ModelConfig { layers: 6, ..gpt2() }).into_iter().step_by(7) {
        let key = (alone.ranks, alone.stage, alone.micro_batches);
        let want = known.entry(key).or_insert_with(|| alone.run());
        // The table's gradient is a sum of two sums, rounded otherwise; then two Adam steps.
        assert_near(&case.run(), want, 2e-4, &format!("{case:?}"));
    }
}
