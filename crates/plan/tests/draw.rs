//! Estimated times respect what a run must respect, and pictures and traces show all of it.

mod common;

use std::collections::BTreeMap;

use common::{chain, offloaded, options};
use gpurun_plan::*;
use gpurun_types::{DType, Lane};
use serde_json::Value;

fn plans() -> Vec<(ModelSpec, Plan)> {
    let mut all = Vec::new();
    for (dp, stage, recompute, offload) in [
        (1, 0, Recompute::None, None),
        (2, 0, Recompute::Selective, None),
        (3, 3, Recompute::Full, Some(OffloadVia::Host)),
        (2, 2, Recompute::None, Some(OffloadVia::Stream)),
    ] {
        let mut o = PlanOptions { recompute, ..options(dp, stage, 3) };
        if let Some(via) = offload {
            o = offloaded(o, via);
        }
        let mut spec = chain(&[4000, 9000, 9000, 2000], true, DType::Bf16);
        spec.units[1].name = "a<b>&\"c\"".into();
        let plan = Plan::build(&spec, &o).expect("legal");
        all.push((spec, plan));
    }
    all
}

fn h200() -> Machine {
    Machine::named("h200", 1, 1).expect("a known name")
}

#[test]
fn estimated_times_respect_lanes_waits_and_rendezvous() {
    let _limit = testkit::time_limit(20);
    for (spec, plan) in plans() {
        let timeline = estimate(&plan, &spec, &h200());
        let mut ends: BTreeMap<(Lane, usize), Vec<Span>> = BTreeMap::new();
        for (rank, spans) in plan.ranks.iter().zip(&timeline.ranks) {
            let mut lanes = [0.0; Lane::ALL.len()];
            for (instr, span) in rank.train.instrs.iter().zip(spans) {
                assert!(span.end >= span.start && span.start >= lanes[instr.lane.index()], "one at a time on a lane");
                lanes[instr.lane.index()] = span.end;
                for wait in &instr.waits {
                    assert!(span.start >= spans[wait.0 as usize].end, "{}", instr.op.label(&spec));
                }
                if matches!(instr.op, Op::AllGather { .. } | Op::ReduceScatter { .. }) {
                    let nth = ends.iter().filter(|((l, _), s)| *l == instr.lane && s.len() > rank.rank.index()).count();
                    ends.entry((instr.lane, nth)).or_default().push(*span);
                }
            }
        }
        for (which, spans) in ends {
            assert_eq!(spans.len(), plan.ranks.len(), "{which:?}: every rank is in it");
            assert!(spans.iter().all(|s| *s == spans[0]), "{which:?}: all at once");
        }
        let last = timeline.ranks.iter().flatten().map(|s| s.end).fold(0.0, f64::max);
        assert_eq!(timeline.seconds, last);
        let compute = timeline.busy(&plan, 0, Lane::Compute);
        assert!(compute > 0.0 && compute <= timeline.seconds);
    }
}

#[test]
fn recomputing_more_takes_longer() {
    let _limit = testkit::time_limit(10);
    let spec = chain(&[4000; 8], false, DType::Bf16);
    let seconds = |recompute| {
        let plan = Plan::build(&spec, &PlanOptions { recompute, ..options(1, 0, 1) }).expect("legal");
        estimate(&plan, &spec, &h200()).seconds
    };
    let [none, selective, full] = [Recompute::None, Recompute::Selective, Recompute::Full].map(seconds);
    assert!(none < selective && selective < full, "{none} {selective} {full}");
}

/// Every tag closes, in order; returns how often each name is opened.
fn well_formed(xml: &str) -> BTreeMap<String, usize> {
    let mut open: Vec<String> = Vec::new();
    let mut counts = BTreeMap::new();
    let mut rest = xml.strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>").expect("an XML declaration");
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        for entity in text.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;"].iter().any(|e| entity.starts_with(e));
            assert!(known, "a bare & in {text:?}");
        }
        let end = at + rest[at..].find('>').expect("every tag ends");
        let tag = &rest[at + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "quotes pair up in {tag:?}");
        let name = |t: &str| t.split([' ', '/']).next().unwrap_or_default().to_owned();
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(closed));
        } else {
            *counts.entry(name(tag)).or_default() += 1;
            if !tag.ends_with('/') {
                open.push(name(tag));
            }
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "{open:?}");
    counts
}

#[test]
fn the_picture_shows_every_instruction_and_kind_of_memory() {
    let _limit = testkit::time_limit(20);
    for (spec, plan) in plans() {
        let timeline = estimate(&plan, &spec, &h200());
        let picture =
            svg(&Drawing { title: "a <model> & more", plan: &plan, spec: &spec, timeline: &timeline, measured: false });
        let counts = well_formed(&picture);
        let rank = &plan.ranks[0];
        assert_eq!(picture.matches(" class=\"i\">").count(), rank.train.instrs.len());
        assert!(counts["svg"] == 1 && picture.contains("a &lt;model&gt; &amp; more") && picture.contains("h200"));
        for instr in &rank.train.instrs {
            let label = instr.op.label(&spec).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            assert!(picture.contains(&format!("<title>{}: ", label.replace('"', "&quot;"))), "{label}");
        }
        let items = memory_report(rank);
        // A kind may be there at another time than the peak, but what is there at the peak is drawn.
        for item in items.iter().filter(|i| i.name != "gaps between buffers") {
            assert!(picture.contains(&format!("<title>{}: at most ", item.name)), "{}", item.name);
        }
    }
}

#[test]
fn the_trace_has_every_rank_lane_and_byte() {
    let _limit = testkit::time_limit(20);
    for (spec, plan) in plans() {
        let timeline = estimate(&plan, &spec, &h200());
        let text = trace(&Drawing { title: "t", plan: &plan, spec: &spec, timeline: &timeline, measured: false });
        let json: Value = serde_json::from_str(&text).expect("valid JSON");
        let events = json["traceEvents"].as_array().expect("a list");
        let of = |ph: &str, rank: usize| -> Vec<&Value> {
            events.iter().filter(|e| e["ph"] == ph && e["pid"] == rank as u64).collect()
        };
        for (rank, planned) in plan.ranks.iter().enumerate() {
            let boxes = of("X", rank);
            assert_eq!(boxes.len(), planned.train.instrs.len());
            for (event, instr) in boxes.iter().zip(&planned.train.instrs) {
                assert_eq!(event["name"], instr.op.label(&spec));
                assert_eq!(event["tid"], instr.lane.index());
            }
            let mut lanes: Vec<Lane> = planned.train.instrs.iter().map(|i| i.lane).collect();
            lanes.sort_unstable();
            lanes.dedup();
            assert_eq!(of("M", rank).len(), 1 + lanes.len(), "a name for the process and each thread");
            for (place, arena) in [("device memory", planned.device_bytes), ("host memory", planned.host_bytes)] {
                let counters: Vec<&Value> = of("C", rank).into_iter().filter(|e| e["name"] == place).collect();
                let sum = |e: &Value| e["args"].as_object().expect("by kind").values().filter_map(Value::as_u64).sum();
                let highest: u64 = counters.iter().map(|e| sum(e)).max().unwrap_or(0);
                assert!(highest <= arena.0, "{place}: {highest} of {arena}");
                assert!(highest * 10 >= arena.0 * 8, "{place}: {highest} of {arena}: most of it is used at the peak");
                let times: Vec<f64> = counters.iter().filter_map(|e| e["ts"].as_f64()).collect();
                assert!(times.windows(2).all(|t| t[0] < t[1]), "times ascend");
            }
        }
    }
}
