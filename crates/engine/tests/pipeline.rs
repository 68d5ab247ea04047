//! Stages of a pipeline change nothing: the same bits as one stage on as many replicas, and near those for tied tables, whose
//! gradients of the two ends are summed apart.

mod common;

use common::{Case, assert_near, assert_same_bits, gpt2, llama};
use gpurun_device::CpuBackend;
use gpurun_engine::model_spec;
use gpurun_plan::{OffloadVia, Op, Part, Plan, Recompute, Schedule};
use gpurun_types::DType;

const SCHEDULES: [Schedule; 5] = [
    Schedule::Gpipe,
    Schedule::OneFOneB,
    Schedule::Interleaved { chunks: 2 },
    Schedule::ZeroBubble,
    Schedule::ZeroBubbleV,
];

#[test]
fn stages_times_replicas_give_the_bits_of_replicas_alone() {
    let _limit = testkit::time_limit(240);
    for (ranks, stage) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)] {
        for micro_batches in [1, 2, 4, 7, 8] {
            let global_batch = (ranks * micro_batches) as usize;
            let base = Case { ranks, stage, micro_batches, global_batch, steps: 2, ..Case::plain(llama()) };
            let alone = base.run();
            for schedule in SCHEDULES {
                // Five units: four stages have no two chunks each.
                for pp in [2, 4].into_iter().filter(|pp| pp * schedule.chunks() <= 5) {
                    let case = Case { pp, schedule, ..base.clone() };
                    assert_same_bits(&case.run(), &alone, &format!("{case:?}"));
                }
            }
        }
    }
}

#[test]
fn pipelines_compose_with_offload_recompute_and_precision() {
    let _limit = testkit::time_limit(240);
    for (dtype, ranks, stage) in [(DType::Bf16, 1, 0), (DType::F16, 2, 2), (DType::F32, 2, 3)] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            for (offload, fraction) in [(None, 1.0), (Some(OffloadVia::Host), 0.5), (Some(OffloadVia::Stream), 1.0)] {
                let base = Case { dtype, ranks, stage, recompute, micro_batches: 3, steps: 2, ..Case::plain(llama()) };
                let alone = base.run();
                for (schedule, split) in [
                    (Schedule::OneFOneB, Some(vec![4, 1])),
                    (Schedule::Interleaved { chunks: 2 }, None),
                    (Schedule::ZeroBubble, None),
                    (Schedule::ZeroBubbleV, None),
                ] {
                    let case = Case { pp: 2, schedule, split, offload, fraction, ..base.clone() };
                    assert_same_bits(&case.run(), &alone, &format!("{case:?}"));
                }
            }
        }
    }
}

#[test]
fn tied_tables_are_one_table() {
    let _limit = testkit::time_limit(240);
    for (ranks, stage) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)] {
        for micro_batches in [1, 3] {
            for offload in [None, Some(OffloadVia::Host)] {
                let base = Case { ranks, stage, micro_batches, offload, ..Case::plain(gpt2()) };
                let alone = base.run();
                let interleaved = Schedule::Interleaved { chunks: 2 };
                for (pp, schedule) in
                    [(2, Schedule::OneFOneB), (2, Schedule::Gpipe), (4, Schedule::OneFOneB), (2, interleaved)]
                {
                    let case = Case { pp, schedule, ..base.clone() };
                    // The table's gradient is a sum of two sums, rounded otherwise; then three Adam steps.
                    assert_near(&case.run(), &alone, 2e-4, &format!("{case:?}"));
                    assert_same_bits(&case.run(), &case.run(), "the same again");
                }
            }
        }
    }
}

#[test]
fn zero_bubble_orders_run_the_gradients_of_blocks_weights_apart() {
    let _limit = testkit::time_limit(30);
    for (schedule, apart) in [(Schedule::OneFOneB, 0), (Schedule::ZeroBubble, 12), (Schedule::ZeroBubbleV, 12)] {
        let case = Case { pp: 2, schedule, micro_batches: 4, global_batch: 4, ..Case::plain(llama()) };
        let model = case.model.build().expect("a valid model");
        let backend = CpuBackend::new(1).expect("a CPU backend");
        let options = case.options();
        let spec = model_spec(&model, options.shape, case.dtype, &backend).expect("a model that can be described");
        let plan = Plan::build(&spec, &options.plan).expect("legal");
        let parts = |part| {
            let instrs = plan.ranks.iter().flat_map(|rank| &rank.train.instrs);
            instrs.filter(|i| matches!(i.op, Op::Backward { part: p, .. } if p == part)).count()
        };
        // Three blocks of four micro-batches; the two ends have whole backwards.
        assert_eq!([parts(Part::Input), parts(Part::Weights)], [apart; 2], "{schedule:?}");
        assert_eq!(parts(Part::Whole), 20 - apart, "{schedule:?}");
    }
}

#[test]
fn loss_scaling_and_skipping_are_decided_alike_on_all_stages() {
    let _limit = testkit::time_limit(120);
    for (ranks, stage) in [(1, 0), (2, 3)] {
        let base = Case {
            dtype: DType::F16,
            ranks,
            stage,
            micro_batches: 2,
            loss_scale: Some(2f32.powi(30)),
            steps: 24,
            ..Case::plain(llama())
        };
        let alone = base.run();
        assert!(alone.skipped[0] && alone.skipped.iter().any(|s| !s), "{:?}", alone.skipped);
        for schedule in SCHEDULES {
            let staged = Case { pp: 2, schedule, ..base.clone() }.run();
            assert_eq!((&staged.skipped, &staged.loss_scales), (&alone.skipped, &alone.loss_scales));
            assert_same_bits(&staged, &alone, "with skipped steps");
        }
    }
}
