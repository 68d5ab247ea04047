//! Random ways to train: each is planned and proved, or refused with both settings named; a sample of them is run, and every
//! rank makes the calls that its plan has, in the plan's order.

mod common;

use std::cell::Cell;
use std::collections::BTreeMap;

use common::{Case, Key, Log, Noting, SEQ, gpt2, llama};
use gpurun_comm::wrap::{Call, Record};
use gpurun_device::CpuBackend;
use gpurun_engine::{Network, model_spec};
use gpurun_model::{BatchShape, ModelConfig};
use gpurun_plan::{
    Group, Layout, Mesh, ModelSpec, OffloadVia, Op, Plan, PlanError, PlanOptions, RankPlan, Recompute, Schedule,
};
use gpurun_types::{DType, Rank};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// A way to train, and the layouts of parameters, gradients and optimizer state where they are not those of a ZeRO stage.
#[derive(Clone, Debug)]
struct Way {
    case: Case,
    layouts: Option<[Layout; 3]>,
}

fn any_schedule() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        Just(Schedule::Gpipe),
        Just(Schedule::OneFOneB),
        (1u32..=4).prop_map(|chunks| Schedule::Interleaved { chunks }),
        Just(Schedule::ZeroBubble),
        Just(Schedule::ZeroBubbleV),
    ]
}

/// Numbers for `--pp-split`: mostly none; else `units` over `chunks`, the more where `spare` says, and now and then one wrong.
fn split(units: usize, chunks: u32, (spare, wrong): (u32, u32)) -> Option<Vec<u32>> {
    let (units, chunks) = (units as u32, chunks.max(1));
    let mut numbers: Vec<u32> =
        (0..chunks).map(|i| units / chunks + u32::from((i + spare) % chunks < units % chunks)).collect();
    match wrong {
        0 => numbers.push(spare),
        1 => numbers[(spare % chunks) as usize] += 1,
        2 => numbers[(spare % chunks) as usize] = 0,
        3..=8 => {}
        _ => return None,
    }
    Some(numbers)
}

fn any_layouts() -> impl Strategy<Value = Option<[Layout; 3]>> {
    let layout = || prop::sample::select(vec![Layout::Replicated, Layout::Sharded]);
    prop_oneof![9 => Just(None), 1 => [layout(), layout(), layout()].prop_map(Some)]
}

fn any_model() -> impl Strategy<Value = ModelConfig> {
    (1usize..=8, any::<bool>()).prop_map(|(layers, tied)| {
        let model = if tied { gpt2() } else { llama() };
        ModelConfig { layers, ..model }
    })
}

/// Up to `most` ranks.
fn any_way(most: u32) -> impl Strategy<Value = Way> {
    let mesh = (1u32..=most).prop_flat_map(move |pp| (Just(pp), 1..=most / pp));
    let sizes = (any_model(), mesh, 1u32..=8, any_schedule(), (0u32..8, 0u32..20));
    let place = prop::sample::select(vec![None, Some(OffloadVia::Host), Some(OffloadVia::Stream)]);
    let dtype = prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]);
    let recompute = prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]);
    let state = (0u8..=3, any_layouts(), place, prop::sample::select(vec![0.0, 0.3, 1.0]), dtype, recompute);
    (sizes, state).prop_map(|(sizes, (stage, layouts, offload, fraction, dtype, recompute))| {
        let (model, (pp, ranks), micro_batches, schedule, numbers) = sizes;
        let split = split(model.layers + 2, pp * schedule.chunks(), numbers);
        let global_batch = (ranks * micro_batches) as usize;
        let plain = Case { stage, offload, fraction, dtype, recompute, micro_batches, ..Case::plain(model) };
        Way { case: Case { ranks, pp, schedule, split, global_batch, steps: 1, ..plain }, layouts }
    })
}

impl Way {
    fn planned(&self) -> (ModelSpec, PlanOptions) {
        let model = self.case.model.build().expect("a valid model");
        let options = self.case.options();
        let backend = CpuBackend::new(1).expect("a CPU backend");
        let shape = BatchShape { batch: 1, seq: SEQ };
        let spec = model_spec(&model, shape, self.case.dtype, &backend).expect("a model that can be described");
        let mut plan = options.plan;
        if let Some([param, grad, optim]) = self.layouts {
            (plan.policy.param.layout, plan.policy.grad.layout, plan.policy.optim.layout) = (param, grad, optim);
        }
        (spec, plan)
    }

    /// The two settings that do not go together, said without the code that refuses them.
    fn conflict(&self) -> Option<[String; 2]> {
        let units = self.case.model.layers as u32 + 2;
        let (pp, chunks) = (self.case.pp, self.case.schedule.chunks());
        let model = format!("a model of {units} units");
        let replicated = |layout: Layout| layout == Layout::Replicated;
        if pp * chunks > units {
            return Some([format!("pp {pp}"), model]);
        }
        if self.layouts.is_some_and(|[p, g, o]| !replicated(p) && replicated(g) || !replicated(g) && replicated(o)) {
            return Some(
                ["shards parameters or gradients", "replicates gradients or optimizer state"].map(String::from),
            );
        }
        let mut split = self.case.split.clone()?;
        let name = format!("pp-split {}", split.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
        if split.len() as u32 != pp * chunks {
            return Some([name, format!("{} chunks of layers", pp * chunks)]);
        }
        if split.iter().sum::<u32>() + 2 == units {
            split[0] += 1;
            *split.last_mut().expect("there is a number") += 1;
        }
        let fits = split.iter().sum::<u32>() == units && split.iter().all(|n| *n > 0);
        (!fits).then_some([name, model])
    }
}

/// The calls of a training step, as the plan of a rank has them.
fn planned_calls(plan: &RankPlan, mesh: Mesh) -> BTreeMap<Key, Vec<Record>> {
    let rank = plan.rank;
    let first = rank.0 / mesh.dp * mesh.dp;
    let members = |group: Group| match group {
        Group::Data => (first..first + mesh.dp).map(Rank).collect(),
        Group::World => (0..mesh.dp * mesh.pp).map(Rank).collect(),
    };
    let pair = |peer: Rank| vec![rank.min(peer), rank.max(peer)];
    let mut calls: BTreeMap<_, Vec<Record>> = BTreeMap::new();
    for instr in &plan.train.instrs {
        let (call, members, region) = match &instr.op {
            Op::AllGather { group, dst, .. } => (Call::AllGather, members(*group), dst),
            Op::ReduceScatter { group, src, .. } => (Call::ReduceScatter, members(*group), src),
            Op::Send { peer, src, .. } => (Call::Send, pair(*peer), src),
            Op::Recv { peer, dst, .. } => (Call::Recv, pair(*peer), dst),
            _ => continue,
        };
        let dtype = plan.buffers[region.buffer.0 as usize].dtype;
        calls.entry((rank, instr.lane, members)).or_default().push(Record { call, elements: region.len, dtype });
    }
    calls
}

/// Tries `check` on as many ways as `cases`.
fn try_ways(cases: u32, ways: impl Strategy<Value = Way>, check: impl Fn(Way) -> Result<(), TestCaseError>) {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new(config).run(&ways, check).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn every_way_is_proved_or_refused_with_both_settings_named() {
    let _limit = testkit::time_limit(120);
    let (proved, refused) = (Cell::new(0), Cell::new(0));
    try_ways(3000, any_way(8), |way| {
        let (spec, options) = way.planned();
        match (Plan::build(&spec, &options), way.conflict()) {
            (Ok(_), None) => proved.set(proved.get() + 1),
            (Err(PlanError::Together { first, second, .. }), Some(named)) => {
                let both = first.contains(&named[0]) && second.contains(&named[1]);
                prop_assert!(both, "{first} and {second}: {named:?}");
                refused.set(refused.get() + 1);
            }
            (built, conflict) => prop_assert!(false, "{:?}, though {conflict:?}", built.map(|_| "a plan")),
        }
        Ok(())
    });
    assert!(proved.get() > 800 && refused.get() > 400, "{proved:?} proved, {refused:?} refused");
}

#[test]
fn every_rank_makes_the_calls_of_its_plan() {
    let _limit = testkit::time_limit(120);
    let legal = any_way(4).prop_filter("settings in conflict", |w| w.layouts.is_none() && w.conflict().is_none());
    try_ways(120, legal, |way| {
        let (spec, options) = way.planned();
        let plan = Plan::build(&spec, &options).expect("no settings are in conflict");
        let log = Log::default();
        let noting = |rank, inner| -> Box<dyn Network> { Box::new(Noting { rank, inner, log: log.clone() }) };
        let out = way.case.run_over(noting);
        prop_assert!(out.losses.iter().all(|loss| loss.is_finite()), "{:?}", out.losses);
        let made: BTreeMap<Key, Vec<Record>> =
            log.lock().expect("nobody panicked").iter().map(|(key, r)| (key.clone(), r.records())).collect();
        let planned: BTreeMap<_, _> = plan.ranks.iter().flat_map(|rank| planned_calls(rank, options.mesh)).collect();
        for (key, calls) in &made {
            let planned = planned.get(key).cloned().unwrap_or_default();
            prop_assert_eq!(calls, &planned, "{:?}", key);
        }
        prop_assert!(planned.keys().all(|key| made.contains_key(key)));
        Ok(())
    });
}
