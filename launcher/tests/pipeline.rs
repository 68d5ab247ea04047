//! Pipelines of real processes: the numbers of one stage, checkpoints that move between stages, and what is refused.

mod common;

use std::path::Path;
use std::process::Command;

use common::{gpurun, run};
use serde_json::Value;

/// An untied model of eight units: stages change no bit of it.
const MODEL: &str = "[model]\npreset = \"tiny\"\ntied = false\nlayers = 6\nwidth = 32\nheads = 4\nkv_heads = 4\nhead_dim = 8\nff = 64\n";

struct Room {
    dir: tempfile::TempDir,
}

impl Room {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("run.toml"), MODEL).expect("the file can be written");
        Self { dir }
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn train(&self, nproc: &str, words: &[&str]) -> Command {
        let mut command = gpurun(&["--nproc", nproc]);
        command.args(["train", "--config", &self.at("run.toml"), "--threads", "1"]);
        command.args(["--seq-len", "32", "--global-batch", "16", "--micro-batch", "2", "--eval-every", "3"]);
        command.args(words);
        command
    }

    /// Runs to the end; what rank 0 said, and loss, norm and held-out loss of every step as printed.
    fn finished(&self, nproc: &str, name: &str, words: &[&str]) -> (String, Vec<[String; 3]>) {
        let metrics = self.at(&format!("{name}.jsonl"));
        let mut command = self.train(nproc, words);
        command.args(["--metrics", &metrics]);
        let done = run(command);
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{done:?}");
        let text = std::fs::read_to_string(Path::new(&metrics)).expect("metrics were written");
        let numbers = text.lines().map(|line| {
            let value: Value = serde_json::from_str(line).expect("one object a line");
            ["loss", "grad_norm", "eval_loss"].map(|field| value[field].to_string())
        });
        (done.stdout, numbers.collect())
    }
}

/// The line with the text that the trained model gave.
fn sample(said: &str) -> &str {
    said.lines().find(|line| line.contains("sample: ")).expect("a sample is shown")
}

#[test]
fn stages_of_processes_give_the_numbers_of_one_stage() {
    let _limit = testkit::time_limit(180);
    let room = Room::new();
    let words = ["--steps", "6", "--warmup", "1"];
    let (said, alone) = room.finished("2", "alone", &words);
    assert_eq!(alone.len(), 6);
    assert!(alone[5].iter().all(|number| number.parse::<f64>().is_ok()), "{alone:?}");
    for (name, more) in [
        ("plain", vec!["--pp", "2"]),
        ("gpipe", vec!["--pp", "2", "--pp-schedule", "gpipe", "--recompute", "full"]),
        ("interleaved", vec!["--pp", "2", "--pp-schedule", "interleaved", "--pp-chunks", "3", "--zero", "1"]),
        ("h1", vec!["--pp", "2", "--pp-schedule", "zero-bubble", "--zero", "1"]),
        ("v", vec!["--pp", "2", "--pp-schedule", "zero-bubble", "--pp-chunks", "2", "--recompute", "selective"]),
        ("split", vec!["--pp", "2", "--pp-split", "2,4"]),
        ("sharded", vec!["--pp", "2", "--offload", "optimizer", "--zero", "1"]),
    ] {
        let (staged_said, staged) = room.finished("4", name, &[&words[..], &more[..]].concat());
        assert_eq!(staged, alone, "{name}");
        assert_eq!(sample(&staged_said), sample(&said), "{name}");
    }
}

#[test]
fn checkpoints_move_between_numbers_of_stages() {
    let _limit = testkit::time_limit(180);
    let room = Room::new();
    let out = room.at("out");
    // The rate is constant, so that a run may be cut anywhere.
    let fixed = ["--schedule", "constant", "--warmup", "1"];
    let (_, whole) = room.finished("1", "whole", &[&fixed[..], &["--steps", "24"]].concat());
    let chunks = ["--pp-schedule", "interleaved", "--pp-chunks", "2"];
    let mut moved = Vec::new();
    for (steps, stages, more) in [
        ("3", "1", &[][..]),
        ("6", "2", &[]),
        ("9", "4", &[]),
        ("12", "1", &[]),
        ("15", "2", &chunks),
        ("18", "4", &["--pp-schedule", "zero-bubble"]),
        ("21", "2", &chunks),
        ("24", "1", &[]),
    ] {
        let words = ["--steps", steps, "--pp", stages, "--out", &out, "--resume", "auto"];
        let (said, numbers) = room.finished(stages, "moved", &[&fixed[..], &words, more].concat());
        assert!(steps == "3" || said.contains("resuming after step "), "{said}");
        moved = numbers;
    }
    let training = |all: &[[String; 3]]| all.iter().map(|n| n[..2].to_vec()).collect::<Vec<_>>();
    assert_eq!(training(&moved), training(&whole));
    assert_eq!(moved[23], whole[23], "the held-out loss too");
    // One process without a pipeline reads what four stages wrote.
    let mut sampled = gpurun(&["sample", "--checkpoint", &out, "--tokens", "5"]);
    sampled.args(["--threads", "1"]);
    assert_eq!(run(sampled).code, 0);
}

#[test]
fn stages_that_cannot_be_are_refused_with_both_settings() {
    let _limit = testkit::time_limit(60);
    let room = Room::new();
    for (nproc, words, parts) in [
        ("4", &["--pp", "3"][..], ["4 ranks (--nproc)", "3 stages"]),
        ("3", &["--global-batch", "18", "--pp", "2"], ["3 ranks (--nproc)", "2 stages"]),
        ("9", &["--pp", "9"], ["pp 9", "a model of 8 units"]),
        ("2", &["--pp-schedule", "gpipe"], ["--pp-schedule", "--pp STAGES"]),
        ("2", &["--pp-split", "4,4"], ["--pp-split", "--pp STAGES"]),
        ("2", &["--pp", "2", "--pp-chunks", "2"], ["--pp-chunks", "--pp-schedule interleaved"]),
        (
            "2",
            &["--pp", "2", "--pp-schedule", "zero-bubble", "--pp-chunks", "3"],
            ["--pp-chunks", "--pp-schedule zero-bubble; use 1 (ZB-H1) or 2 (ZB-V)"],
        ),
        (
            "2",
            &["--pp", "2", "--pp-split", "3,4"],
            ["pp-split 3,4 and a model of 8 units", "the numbers sum to 7; the model has 6 layers"],
        ),
        (
            "4",
            &["--pp", "4", "--pp-schedule", "interleaved", "--pp-chunks", "3"],
            ["pp 4 with 3 chunks a stage", "a model of 8 units"],
        ),
        ("2", &["--pp", "0"], ["--pp: 0 is too few", "at least 1"]),
    ] {
        for command in ["train", "plan"] {
            let mut line = gpurun(&["--nproc", nproc, command, "--config", &room.at("run.toml"), "--threads", "1"]);
            line.args(["--global-batch", "16"].iter().filter(|_| !words.contains(&"--global-batch"))).args(words);
            let done = run(line);
            assert_eq!(done.code, 2, "{done:?}");
            assert!(parts.iter().all(|part| done.cause().contains(part)), "{done:?}");
        }
    }
}
