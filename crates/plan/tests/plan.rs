//! What holds of every plan, and what the verifier refuses.

mod common;

use common::{chain, offloaded, options};
use gpurun_plan::*;
use gpurun_types::{Bytes, DType, Place};
use proptest::prelude::*;

const SCHEDULES: [Schedule; 5] = [
    Schedule::Gpipe,
    Schedule::OneFOneB,
    Schedule::Interleaved { chunks: 2 },
    Schedule::ZeroBubble,
    Schedule::ZeroBubbleV,
];
const RECOMPUTE: &[Recompute] = &[Recompute::None, Recompute::Selective, Recompute::Full];

fn any_options() -> impl Strategy<Value = (ModelSpec, PlanOptions)> {
    let model = (prop::collection::vec(0usize..2000, 2..6), any::<bool>());
    let layout = (1u32..=6, 0u8..=3, 1u32..=4, 0u8..3, 0.0..=1.0f64);
    let pipeline = (1u32..=4, prop::sample::select(SCHEDULES.to_vec()));
    let kinds = (prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]), prop::sample::select(RECOMPUTE));
    (model, layout, kinds, pipeline).prop_map(|((params, tied), layout, (dtype, recompute), (pp, schedule))| {
        let (dp, stage, micro, offload, fraction) = layout;
        let schedule =
            if 2 * pp as usize > params.len() && schedule.chunks() > 1 { Schedule::OneFOneB } else { schedule };
        let pp = pp.min(params.len() as u32);
        // Few ranks, so that a case is quick.
        let mut o = options(if pp > 1 { dp.min(3) } else { dp }, stage, micro);
        (o.mesh.pp, o.schedule) = (pp, schedule);
        o.dtype = dtype;
        o.recompute = recompute;
        o.offload_fraction = fraction;
        let o = match offload {
            0 => o,
            1 => offloaded(o, OffloadVia::Host),
            _ => offloaded(o, OffloadVia::Stream),
        };
        (chain(&params, tied, dtype), o)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_configuration_verifies_and_its_report_adds_up((spec, o) in any_options()) {
        let _limit = testkit::time_limit(60);
        let plan = Plan::build(&spec, &o).expect("a legal configuration");
        for rank in &plan.ranks {
            let items = memory_report(rank);
            for (place, arena) in [(Place::Device, rank.device_bytes), (Place::Host, rank.host_bytes)] {
                let sum: Bytes = items.iter().filter(|i| i.place == place).map(|i| i.bytes).sum();
                prop_assert_eq!(sum, arena);
            }
        }
    }

    #[test]
    fn no_plan_takes_less_than_its_bound((spec, o) in any_options(), name in prop::sample::select(&Machine::NAMES[..])) {
        let _limit = testkit::time_limit(60);
        let machine = Machine::named(name, 2, o.mesh.dp * o.mesh.pp).expect("a known name");
        let bound = Bound::new(&spec, &o, &machine).expect("a legal configuration");
        let sketch = Sketch::build(&spec, &o).expect("a legal configuration");
        let (seconds, bytes) = (estimate_sketch(&sketch, &spec, &machine), sketch.largest().device_bytes);
        prop_assert!(bound.seconds <= seconds * 1.000_001, "{} s, not less than {}", seconds, bound.seconds);
        prop_assert!(bound.without_optimizer <= bound.seconds);
        prop_assert!(bound.device_bytes <= bytes, "{}, not less than {}", bytes, bound.device_bytes);
    }

    #[test]
    fn dropping_any_wait_is_refused((spec, o) in any_options()) {
        let _limit = testkit::time_limit(120);
        let plan = Plan::build(&spec, &o).expect("a legal configuration");
        for at in 0..plan.ranks[0].train.instrs.len() {
            for wait in 0..plan.ranks[0].train.instrs[at].waits.len() {
                let mut broken = plan.clone();
                broken.ranks[0].train.instrs[at].waits.remove(wait);
                let error = verify(&broken).expect_err("a dropped wait leaves a hazard");
                let named = matches!(&error, VerifyError::Hazard { rank, .. } if rank.0 == 0);
                prop_assert!(named, "{} without its wait {}: {}", at, wait, error);
            }
        }
    }

    #[test]
    fn swapping_two_collectives_on_one_rank_is_refused((spec, o) in any_options()) {
        let _limit = testkit::time_limit(120);
        let plan = Plan::build(&spec, &o).expect("a legal configuration");
        let last = plan.ranks.len() - 1;
        let collective = |i: &Instr| matches!(i.op, Op::AllGather { .. } | Op::ReduceScatter { .. });
        let instrs = &plan.ranks[last].train.instrs;
        for first in 0..instrs.len() {
            let next = (first + 1..instrs.len()).find(|j| collective(&instrs[*j]) && instrs[*j].lane == instrs[first].lane);
            let (true, Some(second)) = (collective(&instrs[first]), next) else { continue };
            let unit = |i: usize| match &instrs[i].op {
                Op::AllGather { unit, .. } => *unit,
                Op::ReduceScatter { unit, .. } => Some(*unit),
                _ => None,
            };
            // The same gather twice (forward and backward use of one unit) is one order either way.
            if unit(first) == unit(second) {
                continue;
            }
            let mut broken = plan.clone();
            let (a, b) = (instrs[first].op.clone(), instrs[second].op.clone());
            broken.ranks[last].train.instrs[first].op = b;
            broken.ranks[last].train.instrs[second].op = a;
            let error = verify(&broken).expect_err("ranks enter collectives in different orders").to_string();
            prop_assert!(error.contains("rank "), "{}", error);
        }
    }
}

#[test]
fn collectives_in_another_order_name_both() {
    let _limit = testkit::time_limit(10);
    let plan = Plan::build(&chain(&[100, 200, 300], false, DType::Bf16), &options(2, 0, 1)).expect("legal");
    let instrs = &plan.ranks[1].train.instrs;
    // With its waits moved too there is no hazard: only the order is wrong.
    let reduces: Vec<usize> = (0..instrs.len()).filter(|i| matches!(instrs[*i].op, Op::ReduceScatter { .. })).collect();
    let mut broken = plan.clone();
    let all: Vec<InstrId> =
        (0..reduces[1] as u32).map(InstrId).filter(|i| !reduces.contains(&(i.0 as usize))).collect();
    for (at, from) in [(reduces[0], reduces[1]), (reduces[1], reduces[0])] {
        broken.ranks[1].train.instrs[at].op = instrs[from].op.clone();
        broken.ranks[1].train.instrs[at].waits.clone_from(&all);
    }
    // The first now waits for what comes after it in the list.
    let error = verify(&broken).expect_err("the order differs").to_string();
    assert!(error.contains("rank 1"), "{error}");
}

#[test]
fn a_rank_without_one_collective_is_a_deadlock() {
    let _limit = testkit::time_limit(10);
    let plan = Plan::build(&chain(&[100, 200], false, DType::Bf16), &options(3, 1, 1)).expect("legal");
    let mut broken = plan.clone();
    let at = plan.ranks[2].evaluate.instrs.iter().position(|i| matches!(i.op, Op::AllGather { .. }));
    broken.ranks[2].evaluate.instrs.truncate(at.expect("losses are gathered"));
    let error = verify(&broken).expect_err("two ranks wait for ever");
    assert!(
        matches!(&error, VerifyError::Deadlock(what) if what.contains("rank 0") && !what.contains("rank 2")),
        "{error}"
    );
}

#[test]
fn bytes_follow_the_zero_paper() {
    let _limit = testkit::time_limit(20);
    // Rajbhandari et al. 2020, with fp32 gradients: 2 + 4 + 12 bytes a parameter, each part over N when sharded.
    let params = [40_000usize, 120_000, 120_000, 120_000, 40_000];
    let spec = chain(&params, false, DType::Bf16);
    let total: f64 = spec.units.iter().map(|u| u.elements() as f64).sum();
    let largest = 120_008.0;
    for dp in [1u32, 2, 4, 8] {
        for stage in 0..=3 {
            let plan = Plan::build(&spec, &options(dp, stage, 1)).expect("legal");
            let report = memory_report(&plan.ranks[0]);
            let of = |name: &str| report.iter().filter(|i| i.name == name).map(|i| i.bytes.0 as f64).sum::<f64>();
            let n = f64::from(dp);
            let cut = |on: bool| if on && dp > 1 { n } else { 1.0 };
            let near = |what: &str, got: f64, want: f64| {
                assert!(
                    (got - want).abs() < 0.02 * want + 8192.0,
                    "{what}, stage {stage}, {dp} ranks: {got}, not {want}"
                );
            };
            near("weights", of("weights"), 2.0 * total / cut(stage == 3));
            for state in ["master weights", "Adam m", "Adam v"] {
                near(state, of(state), 4.0 * total / cut(stage >= 1));
            }
            // Transient gradients come on top of shards: two units at a time. The peak may fall where fewer are alive.
            let most = if stage >= 2 && dp > 1 { 4.0 * (total / n + 2.0 * largest) } else { 4.0 * total };
            assert!(of("gradients") < 1.02 * most + 8192.0, "stage {stage}, {dp} ranks: {}", of("gradients"));
        }
    }
}

#[test]
fn moments_in_bf16_take_half_the_bytes_everywhere() {
    let _limit = testkit::time_limit(20);
    let spec = chain(&[40_000, 120_000, 40_000], false, DType::Bf16);
    for base in [
        options(2, 1, 1),
        offloaded(options(2, 2, 1), OffloadVia::Host),
        offloaded(options(1, 0, 1), OffloadVia::Stream),
    ] {
        let planned = |adam_dtype| {
            let plan = Plan::build(&spec, &PlanOptions { adam_dtype, ..base.clone() }).expect("legal");
            let report = memory_report(&plan.ranks[0]);
            let of = |name: &str| report.iter().filter(|i| i.name == name).map(|i| i.bytes.0).sum::<u64>();
            ([of("Adam m"), of("Adam v")], of("master weights"), checkpoint_bytes(&plan.ranks[0], base.mesh.dp).0)
        };
        let (wide, master, checkpoint) = planned(DType::F32);
        let (narrow, same, smaller) = planned(DType::Bf16);
        assert_eq!(wide, narrow.map(|bytes| 2 * bytes));
        assert_eq!(master, same);
        assert_eq!(3 * smaller, 2 * checkpoint, "12 bytes a parameter become 8");
    }
    let wrong = PlanOptions { adam_dtype: DType::F16, ..options(1, 0, 1) };
    let error = Plan::build(&spec, &wrong).expect_err("fp16 moments").to_string();
    assert_eq!(error, "adam-dtype: moments cannot be fp16; use fp32 or bf16");
}

#[test]
fn adam_is_one_instruction_where_nothing_waits_for_one_unit() {
    let _limit = testkit::time_limit(20);
    let spec = chain(&[100, 200, 300, 400], true, DType::Bf16);
    let parts = |o: &PlanOptions| -> (Vec<usize>, Vec<usize>) {
        let plan = Plan::build(&spec, o).expect("legal");
        let instrs = &plan.ranks[0].train.instrs;
        let of = |pick: fn(&Op) -> Option<usize>| instrs.iter().filter_map(|i| pick(&i.op)).collect();
        let norms = of(|op| if let Op::Norm { parts } = op { Some(parts.len()) } else { None });
        (norms, of(|op| if let Op::Adam { parts, .. } = op { Some(parts.len()) } else { None }))
    };
    // Alone, and with gathers just before use; else each unit's weights or gradients travel while the next one is stepped.
    for (dp, stage, adam) in
        [(1, 0, vec![4]), (2, 3, vec![4]), (2, 0, vec![1; 4]), (2, 1, vec![1; 4]), (2, 2, vec![1; 4])]
    {
        assert_eq!(parts(&options(dp, stage, 1)), (vec![4], adam), "{dp} ranks, stage {stage}");
    }
    for via in [OffloadVia::Host, OffloadVia::Stream] {
        let half = PlanOptions { offload_fraction: 0.5, ..offloaded(options(1, 0, 1), via) };
        assert_eq!(parts(&half), (vec![4], vec![2, 1, 1]), "{via:?}");
    }
}

#[test]
fn volumes_follow_the_zero_paper() {
    let _limit = testkit::time_limit(20);
    let spec = chain(&[4096 - 8; 6], false, DType::Bf16);
    let psi: u64 = spec.units.iter().map(|u| u.elements() as u64).sum();
    for dp in [2u32, 4, 8] {
        for (stage, times) in [(0, 2), (1, 2), (2, 2), (3, 3)] {
            let plan = Plan::build(&spec, &options(dp, stage, 1)).expect("legal");
            let mut want = times * psi * u64::from(dp - 1) / u64::from(dp);
            if stage == 3 {
                // The loss unit has no forward of its own in training: its weights are gathered once.
                want -= 4096 * u64::from(dp - 1) / u64::from(dp);
            }
            for rank in &plan.ranks {
                assert_eq!(collective_volume(rank).elements, want, "stage {stage}, {dp} ranks");
            }
        }
    }
}

#[test]
fn a_recompute_and_its_backward_share_one_gather() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[4096 - 8; 6], false, DType::Bf16);
    let gathers = |recompute| {
        let plan = Plan::build(&spec, &PlanOptions { recompute, ..options(4, 3, 2) }).expect("legal");
        collective_volume(&plan.ranks[0])
    };
    for recompute in [Recompute::Selective, Recompute::Full] {
        assert_eq!(gathers(recompute), gathers(Recompute::None), "{recompute:?}");
    }
}

#[test]
fn selective_recompute_frees_what_units_can_restore() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100; 10], false, DType::Bf16);
    let of = |recompute, what: fn(&RankPlan) -> u64| {
        let plan = Plan::build(&spec, &PlanOptions { recompute, ..options(1, 0, 1) }).expect("legal");
        what(&plan.ranks[0])
    };
    let activations =
        |rank: &RankPlan| memory_report(rank).iter().find(|i| i.name == "activations").expect("there are some").bytes.0;
    let bytes = RECOMPUTE.iter().map(|r| of(*r, activations)).collect::<Vec<_>>();
    // Eight middle units let 1920 elements go; at the peak one of them is restored.
    assert_eq!(bytes[0] - bytes[1], 7 * 1920 * 2, "none and selective: {bytes:?}");
    assert!(bytes[2] < bytes[1], "full frees more: {bytes:?}");
    let restores = |rank: &RankPlan| rank.train.instrs.iter().filter(|i| matches!(i.op, Op::Restore { .. })).count();
    assert_eq!(
        of(Recompute::Selective, |rank| rank.train.instrs.len() as u64),
        of(Recompute::None, |r| r.train.instrs.len() as u64) + 8
    );
    let plan = Plan::build(&spec, &PlanOptions { recompute: Recompute::Selective, ..options(1, 0, 1) }).expect("legal");
    assert_eq!(restores(&plan.ranks[0]), 8);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[100, 200], false, DType::Bf16);
    assert!(Policy::for_stage(4, Place::Device).expect_err("no stage 4").to_string().contains("0, 1, 2 or 3"));
    let refused = |o: PlanOptions| Plan::build(&spec, &o).expect_err("refused").to_string();
    assert!(refused(options(0, 0, 1)).starts_with("ranks"));
    assert!(refused(options(1, 0, 0)).starts_with("micro-batches"));
    assert!(refused(PlanOptions { offload_fraction: 1.5, ..options(1, 0, 1) }).starts_with("offload-fraction"));
    assert_eq!(
        refused(PlanOptions { mesh: Mesh { dp: 1, pp: 3 }, ..options(1, 0, 1) }),
        "pp 3 and a model of 2 units cannot go together: each stage needs a unit of its own; use 1 to 2 stages"
    );
    let mut mixed = options(2, 3, 1);
    mixed.policy.grad.layout = Layout::Replicated;
    assert!(refused(mixed).contains("cannot go together"));
}

#[test]
fn a_large_model_on_eight_ranks_is_planned() {
    // A bound on the work, not a timing: quadratic passes would run past it.
    let _limit = testkit::time_limit(60);
    let spec = chain(&[4096; 34], false, DType::Bf16);
    for stage in [0, 3] {
        Plan::build(&spec, &options(8, stage, 16)).expect("legal");
    }
}
