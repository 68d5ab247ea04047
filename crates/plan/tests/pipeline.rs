//! Pipelines: bubbles are the formulas', activations are the schedules', and what could hang is refused.

mod common;

use common::{chain, options};
use gpurun_plan::*;
use gpurun_types::{DType, Lane, Rank};

const SCHEDULES: [Schedule; 6] = [
    Schedule::Gpipe,
    Schedule::OneFOneB,
    Schedule::Interleaved { chunks: 2 },
    Schedule::Interleaved { chunks: 4 },
    Schedule::ZeroBubble,
    Schedule::ZeroBubbleV,
];

fn staged(pp: u32, dp: u32, micro_batches: u32, schedule: Schedule) -> PlanOptions {
    PlanOptions { mesh: Mesh { dp, pp }, schedule, ..options(dp, 0, micro_batches) }
}

/// Units of equal cost between ends that cost nothing, on a machine where only arithmetic takes time.
fn balanced(units: usize) -> (ModelSpec, Machine) {
    let mut spec = chain(&vec![100; units + 2], false, DType::Bf16);
    for (index, unit) in spec.units.iter_mut().enumerate() {
        let flops = if index == 0 || index == units + 1 { 0.0 } else { 1e9 };
        (unit.forward_flops, unit.weights_flops) = (flops, flops);
    }
    let machine = Machine {
        half_flops: 1e12,
        memory: f64::INFINITY,
        host_memory: f64::INFINITY,
        to_device: f64::INFINITY,
        to_host: f64::INFINITY,
        peer_link: f64::INFINITY,
        start: 0.0,
        hop: 0.0,
        ..Machine::named("h200", 1, 1).expect("a known name")
    };
    (spec, machine)
}

#[test]
fn bubbles_are_what_the_formula_says() {
    let _limit = testkit::time_limit(60);
    // Every chunk has as many units of equal cost.
    let (spec, machine) = balanced(16);
    for schedule in SCHEDULES {
        for pp in [1, 2, 4, 8].into_iter().filter(|pp| pp * schedule.chunks() <= 16) {
            for micro_batches in [1, 2, 4, 7, 8, 16] {
                let plan = Plan::build(&spec, &staged(pp, 1, micro_batches, schedule)).expect("legal");
                let timeline = estimate(&plan, &spec, &machine);
                let formula = schedule.bubble(pp, micro_batches);
                for rank in 0..pp as usize {
                    let idle = 1.0 - timeline.busy(&plan, rank, Lane::Compute) / timeline.seconds;
                    let what = format!("{schedule:?}, {pp} stages, {micro_batches} micro-batches, rank {rank}");
                    assert!((idle - formula).abs() < 1e-9, "{what}: {idle}, not {formula}");
                }
            }
        }
    }
}

#[test]
fn formulas_are_those_of_the_papers() {
    let _limit = testkit::time_limit(10);
    // Idle time over the time of the work: (p - 1) / m, a v-th of it interleaved, a third for ZB-H1.
    let idle = |schedule: Schedule, p, m| {
        let share = schedule.bubble(p, m);
        share / (1.0 - share)
    };
    for (p, m) in [(2, 4), (4, 8), (4, 13), (8, 16)] {
        let plain = f64::from(p - 1) / f64::from(m);
        for (schedule, part) in [
            (Schedule::Gpipe, 1.0),
            (Schedule::OneFOneB, 1.0),
            (Schedule::Interleaved { chunks: 2 }, 2.0),
            (Schedule::Interleaved { chunks: 4 }, 4.0),
            (Schedule::ZeroBubble, 3.0),
            // Nothing but the time until the last stage has its first micro-batch: a chunk is half a stage.
            (Schedule::ZeroBubbleV, 6.0),
        ] {
            assert!((idle(schedule, p, m) - plain / part).abs() < 1e-12, "{schedule:?}, {p} stages, {m} micro-batches");
        }
    }
}

#[test]
fn sketches_take_as_long_as_plans() {
    let _limit = testkit::time_limit(30);
    let (spec, _) = balanced(6);
    let machine = Machine::named("a100", 1, 1).expect("a known name");
    for (pp, dp) in [(1, 4), (2, 2), (4, 3)] {
        for schedule in SCHEDULES.into_iter().filter(|s| s.chunks() * pp <= 8) {
            let o = staged(pp, dp, 4, schedule);
            let plan = Plan::build(&spec, &o).expect("legal");
            let sketch = Sketch::build(&spec, &o).expect("legal");
            assert_eq!(estimate_sketch(&sketch, &spec, &machine), estimate(&plan, &spec, &machine).seconds);
            assert_eq!(Some(sketch.largest().device_bytes), plan.ranks.iter().map(|r| r.device_bytes).max());
        }
    }
}

#[test]
fn stages_hold_the_activations_that_their_schedule_says() {
    let _limit = testkit::time_limit(30);
    let spec = chain(&[100; 10], false, DType::Bf16);
    let activations = |schedule| -> Vec<u64> {
        let plan = Plan::build(&spec, &staged(4, 1, 8, schedule)).expect("legal");
        let of =
            |rank: &RankPlan| memory_report(rank).iter().find(|i| i.name == "activations").map_or(0, |i| i.bytes.0);
        plan.ranks.iter().map(of).collect()
    };
    let (gpipe, one) = (activations(Schedule::Gpipe), activations(Schedule::OneFOneB));
    for stage in 0..4 {
        // 4 - stage micro-batches instead of 8, and a few edges on their way.
        let share = one[stage] as f64 / gpipe[stage] as f64;
        let formula = f64::from(4 - stage as u32) / 8.0;
        assert!((share - formula).abs() < 0.12, "stage {stage}: {one:?} of {gpipe:?}");
    }
    // A plan whose schedule is another than it says.
    let mut plan = Plan::build(&spec, &staged(4, 1, 8, Schedule::Gpipe)).expect("legal");
    plan.options.schedule = Schedule::OneFOneB;
    let error = verify(&plan).expect_err("too many are alive");
    assert_eq!(error, VerifyError::InFlight { rank: Rank(0), held: 8, expected: 4 });
}

#[test]
fn one_queue_for_sends_and_receives_is_a_deadlock() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100; 4], false, DType::Bf16);
    let mut plan = Plan::build(&spec, &staged(2, 1, 4, Schedule::OneFOneB)).expect("legal");
    for rank in &mut plan.ranks {
        for instr in rank.train.instrs.iter_mut().filter(|i| i.lane == Lane::Receive) {
            instr.lane = Lane::Send;
        }
    }
    let error = verify(&plan).expect_err("a send waits in front of the receive that its partner waits for").to_string();
    for part in ["deadlock", "rank 0, send lane", "rank 1, send lane", "(recv)"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn stages_are_balanced_with_both_ends_counted() {
    let _limit = testkit::time_limit(10);
    let mut spec = chain(&[100; 10], false, DType::Bf16);
    // A head as dear as four blocks, an embedding that costs nothing but its edge.
    spec.units.iter_mut().for_each(|unit| unit.forward_flops = 1e9);
    spec.units[0].forward_flops = 0.0;
    spec.units[9].forward_flops = 4e9;
    let plan = Plan::build(&spec, &staged(3, 1, 2, Schedule::OneFOneB)).expect("legal");
    let units = plan.ranks.iter().map(|r| r.homes.len()).collect::<Vec<_>>();
    assert_eq!(units, [5, 4, 1], "0 + 4, 4, and 4 forwards' worth");
}

#[test]
fn chunks_are_where_their_schedule_has_them() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100; 10], false, DType::Bf16);
    let chunks = |schedule, split: Option<Vec<u32>>| -> Vec<Vec<std::ops::Range<u32>>> {
        let plan = Plan::build(&spec, &PlanOptions { split, ..staged(2, 1, 4, schedule) }).expect("legal");
        plan.ranks.into_iter().map(|rank| rank.chunks).collect()
    };
    let interleaved = Schedule::Interleaved { chunks: 2 };
    // In units, and in layers, to which both ends are added.
    assert_eq!(chunks(interleaved, Some(vec![3, 3, 3, 1])), [[0..3, 6..9], [3..6, 9..10]]);
    assert_eq!(chunks(interleaved, Some(vec![2, 3, 3, 0])), [[0..3, 6..9], [3..6, 9..10]]);
    assert_eq!(chunks(Schedule::ZeroBubbleV, Some(vec![3, 3, 3, 1])), [[0..3, 9..10], [3..6, 6..9]]);
    assert_eq!(chunks(Schedule::OneFOneB, Some(vec![7, 3])).concat(), [0..7, 7..10]);
}

#[test]
fn splits_that_cannot_be_say_what_would() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100; 10], false, DType::Bf16);
    for (split, part) in [
        (vec![5, 5, 5], "pp-split 5,5,5 and 2 chunks of layers cannot go together: 3 numbers"),
        (
            vec![5, 6],
            "pp-split 5,6 and a model of 10 units cannot go together: the numbers sum to 11; the model has 8 layers",
        ),
        (vec![10, 0], "pp-split 10,0 and a model of 10 units cannot go together: chunk 1 gets nothing"),
    ] {
        let options = PlanOptions { split: Some(split), ..staged(2, 1, 4, Schedule::OneFOneB) };
        let error = Plan::build(&spec, &options).expect_err("no split").to_string();
        assert!(error.starts_with(part), "{error}");
    }
    let error =
        Plan::build(&spec, &staged(4, 1, 4, Schedule::Interleaved { chunks: 3 })).expect_err("too many").to_string();
    assert_eq!(
        error,
        "pp 4 with 3 chunks a stage and a model of 10 units cannot go together: each chunk needs a unit of its own; use at most 2 chunks"
    );
}

#[test]
fn messages_in_another_order_name_both() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100; 10], false, DType::Bf16);
    for schedule in SCHEDULES {
        let plan = Plan::build(&spec, &staged(2, 1, 4, schedule)).expect("legal");
        for lane in [Lane::Send, Lane::Receive] {
            let mut broken = plan.clone();
            let instrs = &mut broken.ranks[0].train.instrs;
            let mut on_lane = (0..instrs.len()).filter(|i| instrs[*i].lane == lane);
            let (first, second) = (on_lane.next().expect("a message"), on_lane.next().expect("another"));
            // Only what they carry changes places, so that there is no hazard: the wrong edge would be worked on.
            let micros = [first, second].map(|at| match instrs[at].op {
                Op::Send { unit, micro, .. } | Op::Recv { unit, micro, .. } => (unit, micro),
                _ => unreachable!("a lane of messages"),
            });
            for (at, (new_unit, new_micro)) in [(first, micros[1]), (second, micros[0])] {
                if let Op::Send { unit, micro, .. } | Op::Recv { unit, micro, .. } = &mut instrs[at].op {
                    (*unit, *micro) = (new_unit, new_micro);
                }
            }
            let error = verify(&broken).expect_err("the wrong message").to_string();
            assert!(error.contains("rank 0 comes to") && error.contains("rank 1 comes to"), "{error}");
        }
    }
}

#[test]
fn a_message_that_is_not_sent_is_a_deadlock() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100; 5], true, DType::Bf16);
    let plan = Plan::build(&spec, &staged(2, 2, 2, Schedule::OneFOneB)).expect("legal");
    let sends = plan.ranks[3].train.instrs.iter().filter(|i| matches!(i.op, Op::Send { .. })).count();
    assert_eq!(sends, 3, "two gradients of edges, one of the tied table");
    let mut broken = plan;
    let last = broken.ranks[3].train.instrs.iter_mut().rev().find(|i| matches!(i.op, Op::Send { .. }));
    if let Some(Instr { op: Op::Send { peer, .. }, .. }) = last {
        *peer = Rank(0);
    }
    let error = verify(&broken).expect_err("rank 1 waits for ever").to_string();
    assert!(error.contains("deadlock") && error.contains("rank 1"), "{error}");
}
