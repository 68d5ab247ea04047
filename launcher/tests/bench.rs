//! `bench` on processes of the CPU: what it reports adds up.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Done, gpurun, run};
use serde_json::Value;

fn bench(options: &[&str], words: &[&str]) -> Done {
    let mut command = gpurun(options);
    command.args(["bench", "--threads", "1", "--seq-len", "32", "--steps", "4", "--warm-up-steps", "1"]).args(words);
    run(command)
}

/// The one JSON object that it prints.
fn report(options: &[&str], words: &[&str]) -> Value {
    let done = bench(options, &[&["--json"], words].concat());
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{done:?}");
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// Kinds of instructions by what they do: times, seconds, floor.
fn kind(report: &Value, what: &str) -> [f64; 3] {
    let all = report["instructions"].as_array().unwrap();
    let found = all.iter().find(|kind| kind["what"] == what).unwrap_or_else(|| panic!("no {what} in {all:?}"));
    ["count", "seconds", "floor_seconds"].map(|field| number(&found[field]))
}

#[test]
fn speed_memory_and_instruction_times_add_up() {
    let _limit = testkit::time_limit(60);
    let report = report(&[], &["--global-batch", "4", "--micro-batch", "2"]);
    let steps = &report["step_seconds"];
    let [p10, median, p90] = ["p10", "median", "p90"].map(|field| number(&steps[field]));
    assert!(0.0 < p10 && p10 <= median && median <= p90, "{steps}");
    assert_eq!(steps["all"].as_array().unwrap().len(), 4);
    assert_eq!(report["tokens_per_step"], 128);
    let speed = number(&report["tokens_per_second"]);
    assert!(near(speed * median, 128.0));
    let flops = number(&report["flops_per_token"]) * speed;
    assert!(near(number(&report["mfu"]), flops / number(&report["peak"]["flops"])));
    assert!(report["peak"]["source"].as_str().unwrap().contains("measured"), "a processor's peak is in no table");
    assert!(near(number(&report["fraction_of_limit"]), number(&report["limit_seconds"]) / median));

    let memory = &report["memory"][0];
    let sum: f64 = memory["items"].as_array().unwrap().iter().map(|item| number(&item["bytes"])).sum();
    assert_eq!(sum, number(&memory["device_planned_bytes"]) + number(&memory["host_planned_bytes"]));
    assert_eq!(memory["device_allocated_bytes"], memory["device_planned_bytes"]);
    assert!(number(&memory["host_allocated_bytes"]) > number(&memory["host_planned_bytes"]), "batches on their way");
    assert!(number(&memory["device_used_bytes"]) > number(&memory["device_planned_bytes"]));

    // Four blocks, two micro-batches.
    assert_eq!(kind(&report, "forward h.*")[0], 8.0);
    assert_eq!(kind(&report, "backward h.*")[0], 8.0);
    let on_lane = |lane: &str| -> f64 {
        let kinds = report["instructions"].as_array().unwrap().iter().filter(|kind| kind["lane"] == lane);
        kinds.map(|kind| number(&kind["seconds"])).sum()
    };
    let whole = number(&report["profiled_step_seconds"]);
    assert!(on_lane("compute") <= whole && on_lane("compute") > 0.5 * whole, "{} of {whole}", on_lane("compute"));
    assert!(report["instructions"].as_array().unwrap().iter().all(|kind| number(&kind["floor_seconds"]) > 0.0));
    assert_eq!(report["communication"].as_array().unwrap().len(), 0);
    assert!(report["pipeline"].is_null());
}

#[test]
fn ranks_tell_what_they_wait_for_and_a_trace_has_every_instruction() {
    let _limit = testkit::time_limit(60);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("step.json");
    let words = ["--zero", "3", "--global-batch", "4", "--trace", file.to_str().unwrap()];
    let report = report(&["--nproc", "2"], &words);
    assert_eq!(report["memory"].as_array().unwrap().len(), 2);
    let whole = number(&report["profiled_step_seconds"]);
    for (rank, of) in report["communication"].as_array().unwrap().iter().enumerate() {
        assert_eq!(of["rank"], rank);
        for times in [&of["measured"], &of["floor"]] {
            let exposed = number(&times["exposed_collectives"]);
            assert!((0.0..=number(&times["seconds"])).contains(&exposed), "{times}");
            assert_eq!(number(&times["exposed_messages"]), 0.0);
        }
        assert!((0.0..=whole).contains(&number(&of["measured"]["seconds"])), "{of}");
    }
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert!(trace["otherData"]["times"].as_str().unwrap().starts_with("measured"));
    let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
    let events: Vec<&Value> = events.collect();
    let told: f64 =
        report["instructions"].as_array().unwrap().iter().map(|k| number(&k["count"]) * number(&k["ranks"])).sum();
    assert_eq!(events.len() as f64, told);
    let end = |event: &Value| number(&event["ts"]) + number(&event["dur"]);
    assert!(events.iter().all(|event| number(&event["dur"]) >= 0.0 && number(&event["ts"]) >= 0.0));
    // On a lane one comes after the other.
    for pid in 0..2 {
        let compute: Vec<_> = events.iter().filter(|e| e["pid"] == pid && e["tid"] == 0).collect();
        assert!(compute.windows(2).all(|pair| end(pair[0]) <= number(&pair[1]["ts"]) + 1e-3));
    }
}

#[test]
fn the_idle_time_of_a_pipeline_stands_beside_what_was_predicted() {
    let _limit = testkit::time_limit(60);
    let words = ["--pp", "2", "--global-batch", "8", "--micro-batch", "2"];
    let report = report(&["--nproc", "2"], &words);
    let pipeline = &report["pipeline"];
    assert!(near(number(&pipeline["formula"]), 1.0 / 5.0), "(p - 1) / (m + p - 1): {pipeline}");
    let stages = pipeline["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 2);
    for stage in stages {
        let [measured, predicted, limit] = ["measured", "predicted", "at_limit"].map(|field| number(&stage[field]));
        assert!([measured, predicted, limit].iter().all(|idle| (0.0..1.0).contains(idle)), "{stage}");
        // The prediction has the same passes and nothing else in the way.
        assert!(measured > predicted - 0.1, "{stage}");
    }
    let text = bench(&["--nproc", "2"], &words).stdout;
    assert!(text.contains("2 stages in the order of 1f1b: idle 20.0 % of a step"), "{text}");
    assert!(text.contains("messages between stages") && text.contains("tokens/s"), "{text}");
}

#[test]
fn what_would_have_no_effect_is_refused() {
    let _limit = testkit::time_limit(30);
    for (words, said) in [
        (&["--out", "somewhere"][..], "--out: has no effect in bench"),
        (&["--metrics", "m.jsonl"], "--metrics: has no effect in bench"),
        (&["--warm-up-step", "1"], "--warm-up-steps"),
        (&["--trace", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (&["--gpu-memory-limit", "1KiB", "--zero", "0"], "does not fit"),
    ] {
        let done = bench(&[], words);
        assert_eq!(done.code, if said == "does not fit" { 3 } else { 2 }, "{done:?}");
        assert!(done.cause().contains(said), "{done:?}");
    }
}
