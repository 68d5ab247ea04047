//! Ranks on GPUs, through NCCL: what one rank learns, several learn, whatever the stage, the offload and the micro-batches.
//!
//! On a machine with fewer GPUs than ranks they share one, which needs an NCCL that allows it. `GPURUN_TEST_BINARY` names the
//! executable where these tests were built elsewhere; with `GPURUN_REQUIRE_GPU` set, nothing is skipped.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Done, Running, run};
use gpurun_checkpoint::{Checkpoint, Section};
use gpurun_comm::{Nccl, NcclOptions};
use gpurun_device::cuda_device_ids;
use rustix::process::{Pid, Signal};

const STEPS: usize = 20;

/// fp32 sums of 16 sequences in another order, through 20 steps of Adam, whose first steps have the size of the learning rate
/// whatever the size of the gradient: parameters with next to no gradient differ most.
const LOSS_TOLERANCE: f64 = 2e-4;
const WEIGHT_TOLERANCE: f64 = 2e-2;

/// One way to train.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    zero: u8,
    offload: Option<&'static str>,
    micro_batches: u32,
    nccl: bool,
}

/// What came out: every loss, and every number of the checkpoint.
#[derive(PartialEq)]
struct Outcome {
    losses: Vec<f64>,
    state: BTreeMap<(String, &'static str), Vec<f32>>,
}

/// Looks for GPUs and an NCCL for `ranks`; says why not.
fn missing(ranks: u32) -> Option<String> {
    let gpus = match cuda_device_ids() {
        Ok(ids) if !ids.is_empty() => ids.len() as u32,
        _ => return Some("no GPU".to_owned()),
    };
    let options = NcclOptions { timeout: Duration::from_secs(10), ranks_per_gpu: ranks.div_ceil(gpus) };
    match Nccl::load(options) {
        Ok(Some(_)) => None,
        Ok(None) => Some("no NCCL".to_owned()),
        Err(reason) => Some(reason),
    }
}

/// True when the test cannot run here.
fn skipped(ranks: u32) -> bool {
    let Some(reason) = missing(ranks) else { return false };
    assert!(std::env::var_os("GPURUN_REQUIRE_GPU").is_none(), "a GPU is required: {reason}");
    println!("skipped: {reason}");
    true
}

fn gpurun(ranks: u32, options: &[&str]) -> Command {
    let program = std::env::var("GPURUN_TEST_BINARY").unwrap_or_else(|_| common::GPURUN.to_owned());
    let mut command = Command::new("env");
    command.args(["--default-signal", &program, "--nproc", &ranks.to_string()]).args(options);
    command.args(["train", "--device", "cuda", "--seq-len", "64", "--eval-every", "0", "--lr", "1e-3"]);
    command.args(["--clip", "1", "--warmup", "2", "--global-batch", "16"]);
    if cuda_device_ids().is_ok_and(|ids| (ids.len() as u32) < ranks) {
        command.arg("--share-gpu");
    }
    command
}

impl Case {
    const fn plain(ranks: u32) -> Self {
        Self { ranks, zero: 0, offload: None, micro_batches: 1, nccl: true }
    }

    fn run(self) -> Outcome {
        let room = tempfile::tempdir().unwrap();
        let at = |name: &str| room.path().join(name).display().to_string();
        let mut command = gpurun(self.ranks, &[]);
        command.args(["--steps", &STEPS.to_string(), "--out", &at("out"), "--metrics", &at("m.jsonl")]);
        command.args(["--zero", &self.zero.to_string()]);
        command.args(["--micro-batch", &(16 / self.ranks / self.micro_batches).to_string()]);
        if let Some(via) = self.offload {
            command.args(["--offload", "optimizer", "--offload-via", via]);
        }
        if !self.nccl {
            command.env("GPURUN_NCCL_PATH", "");
        }
        let done = run(command);
        assert_eq!(done.code, 0, "{self:?}: {done:?}");
        let way = if self.nccl { "through NCCL" } else { "through host memory" };
        assert!(self.ranks == 1 || done.stdout.contains(way), "{done:?}");
        Outcome { losses: losses(&room.path().join("m.jsonl")), state: state(&room.path().join("out")) }
    }
}

fn losses(metrics: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(metrics).unwrap();
    let number = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(number).collect()
}

fn state(out: &Path) -> BTreeMap<(String, &'static str), Vec<f32>> {
    let checkpoint = Checkpoint::open(out.join(format!("step-{STEPS:08}"))).unwrap();
    let mut all = BTreeMap::new();
    for tensor in &checkpoint.meta().tensors {
        for (section, name) in [(Section::Weight, "weight"), (Section::M, "m"), (Section::V, "v")] {
            let mut values = vec![0.0; tensor.shape.iter().product()];
            checkpoint.read(&tensor.name, section, 0, &mut values).unwrap();
            all.insert((tensor.name.clone(), name), values);
        }
    }
    all
}

/// Largest relative differences of losses and, by tensor, of weights.
fn distance(a: &Outcome, b: &Outcome) -> (f64, f64) {
    assert_eq!(a.losses.len(), STEPS);
    let loss = a.losses.iter().zip(&b.losses).map(|(x, y)| ((x - y) / y).abs()).fold(0.0, f64::max);
    let mut worst: f64 = 0.0;
    for (key, x) in a.state.iter().filter(|(key, _)| key.1 == "weight") {
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let y = &b.state[key];
        let difference = square(&mut x.iter().zip(y).map(|(x, y)| f64::from(x - y)));
        worst = worst.max(difference / square(&mut y.iter().map(|y| f64::from(*y))).max(1e-3));
    }
    (loss, worst)
}

fn compare(ranks: u32, offloads: &[Option<&'static str>]) {
    let one = Case::plain(1).run();
    assert!(one.losses[STEPS - 1] < one.losses[0] - 0.5, "it learns: {:?}", one.losses);
    let mut bits: BTreeMap<(bool, u32), Outcome> = BTreeMap::new();
    for micro_batches in [1, 4] {
        for zero in 0..=3 {
            for &offload in offloads {
                let case = Case { zero, offload, micro_batches, ..Case::plain(ranks) };
                let out = case.run();
                let (loss, weight) = distance(&out, &one);
                println!("{case:?}: loss {loss:.1e} weight {weight:.1e}");
                assert!(
                    loss < LOSS_TOLERANCE && weight < WEIGHT_TOLERANCE,
                    "{case:?}: loss {loss:e} weight {weight:e}"
                );
                // Stages 0 and 1 add micro-batches before ranks, 2 and 3 ranks before micro-batches.
                let order = (zero >= 2 && micro_batches > 1, micro_batches);
                let first = bits.entry(order).or_insert_with(|| case.run());
                assert!(
                    *first == out,
                    "{case:?} has other bits than stage {} without offload",
                    if order.0 { 2 } else { 0 }
                );
            }
        }
    }
}

#[test]
fn two_ranks_learn_what_one_does() {
    let _limit = testkit::time_limit(280);
    if !skipped(2) {
        compare(2, &[None, Some("host"), Some("stream")]);
    }
}

#[test]
fn four_ranks_learn_what_one_does() {
    let _limit = testkit::time_limit(280);
    if !skipped(4) {
        compare(4, &[None, Some("host")]);
    }
}

#[test]
fn without_nccl_ranks_talk_through_host_memory() {
    let _limit = testkit::time_limit(120);
    if skipped(2) {
        return;
    }
    let one = Case::plain(1).run();
    let first = Case { zero: 3, micro_batches: 4, nccl: false, ..Case::plain(2) };
    let out = first.run();
    let (loss, weight) = distance(&out, &one);
    println!("{first:?}: loss {loss:.1e} weight {weight:.1e}");
    assert!(loss < LOSS_TOLERANCE && weight < WEIGHT_TOLERANCE, "loss {loss:e} weight {weight:e}");
    let again = Case { zero: 2, ..first }.run();
    assert!(out == again, "stages 2 and 3 give the same bits");
}

#[test]
fn a_rank_that_dies_or_stops_takes_the_others_with_it() {
    let _limit = testkit::time_limit(120);
    if skipped(2) {
        return;
    }
    for (signal, code) in [(Signal::KILL, 4), (Signal::STOP, 6)] {
        let mut command = gpurun(2, &["--hang-timeout", "2"]);
        command.args(["--steps", "100000", "--zero", "3"]);
        let mut running = Running::start(command);
        running.wait_for("step 3/");
        rustix::process::kill_process(rank_of(&running, 1), signal).unwrap();
        let began = Instant::now();
        let done: Done = running.finish();
        let seconds = began.elapsed().as_secs_f64();
        println!("{signal:?}: exit {} after {seconds:.1} s: {}", done.code, done.cause());
        assert_eq!(done.code, code, "{done:?}");
        assert!(done.cause().starts_with("rank 1 "), "{done:?}");
        assert!(seconds < if code == 4 { 5.0 } else { 9.0 }, "{done:?}");
    }
}

/// The process of a rank: a child of the launcher with that rank in its environment.
fn rank_of(running: &Running, rank: u32) -> Pid {
    let launcher = running.child.id();
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let wanted = format!("RANK={rank}");
    let is_wanted = |pid: &&str| {
        let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    let pid = children.split_whitespace().find(is_wanted).unwrap();
    Pid::from_raw(pid.parse().unwrap()).unwrap()
}
