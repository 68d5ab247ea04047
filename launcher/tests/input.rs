//! What users get wrong: each mistake is one clear line and exit code 2, and nothing is left half-written.

mod common;

use std::path::{Path, PathBuf};

use common::{gpurun, run};

struct Room(tempfile::TempDir);

impl Room {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.path().join(name), contents).expect("a file");
        self.path(name)
    }
}

/// Runs `gpurun --nproc 2 train` with these words; the one line that it says.
fn refused(words: &[&str]) -> String {
    let mut command = gpurun(&["--nproc", "2", "train"]);
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cache");
    command.args(words).env("XDG_CACHE_HOME", cache);
    let done = run(command);
    assert_eq!(done.code, 2, "{words:?}: {done:?}");
    assert_eq!(done.stderr.lines().count(), 1, "{words:?}: {done:?}");
    assert!(!done.stdout.contains("step 1/"), "{words:?}: nothing is trained: {done:?}");
    done.cause().to_owned()
}

fn says(words: &[&str], parts: &[&str]) {
    let line = refused(words);
    for part in parts {
        assert!(line.contains(part), "{words:?} should name {part:?}: {line}");
    }
}

#[test]
fn options_that_are_wrong() {
    let _limit = testkit::time_limit(120);
    let room = Room::new();
    says(&["--seq-length", "4"], &["--seq-length", "--seq-len"]);
    let config = room.file("run.toml", "lr = 1e-3\nlernrate = 2\n");
    says(&["--config", &config], &["run.toml:2", "lernrate"]);
    says(&["--lr", "nan"], &["--lr", "NaN"]);
    says(&["--lr=-1e-3"], &["--lr"]);
    says(&["--global-batch", "7"], &["7", "2 ranks", "6 or 8"]);
    says(&["--model", "gpt2-125m"], &["gpt2-125m", "gpt2-124m"]);
    says(&["--seq-len", "1000"], &["1000", "256"]);
    says(&["--steps", "3", "--epochs", "2"], &["--steps", "--epochs"]);
    says(&["--zero", "4"], &["4"]);
    says(&["--dtype", "fp8"], &["fp8", "bf16"]);
}

#[test]
fn data_that_is_wrong() {
    let _limit = testkit::time_limit(120);
    let room = Room::new();
    says(&["--data", "/no/such/data"], &["/no/such/data", "does not exist"]);
    says(&["--data", &room.file("empty.txt", "")], &["empty.txt", "no text"]);
    says(&["--data", &room.file("short.txt", "too short")], &["10 tokens", "--seq-len"]);
    says(&["--data", &room.file("bad.jsonl", "{\"text\": \"ok\"}\n{oops\n")], &["bad.jsonl:2", "not JSON"]);
    says(&["--data", &room.file("bad.bin", [7; 2000])], &["bad.bin", "no token shard"]);
    says(&["--tokenizer", &room.file("not.json", "{}")], &["not.json", "no tokenizer"]);
    let mut shard: Vec<u8> = [20_240_520i32, 1, 600].iter().flat_map(|w| w.to_le_bytes()).collect();
    shard.resize(1024, 0);
    shard.extend([9u16; 600].iter().flat_map(|t| t.to_le_bytes()));
    shard[1024 + 2 * 77..][..2].copy_from_slice(&999u16.to_le_bytes());
    says(
        &["--data", &room.file("ids.bin", shard)],
        &["ids.bin, byte 1178 (token 77)", "token 999", "vocabulary of 257"],
    );
}

#[test]
fn places_that_cannot_be_written() {
    let _limit = testkit::time_limit(60);
    let room = Room::new();
    let file = room.file("a-file", "");
    says(&["--steps", "2", "--out", &format!("{file}/below")], &["a-file"]);
    says(&["--steps", "2", "--metrics", &format!("{file}/below.jsonl")], &["a-file"]);
    assert_eq!(std::fs::read(Path::new(&file)).expect("still there"), b"");
}

#[test]
fn launcher_options_that_are_wrong() {
    let _limit = testkit::time_limit(60);
    for (words, part) in [
        (&["--nproc", "0", "train"][..], "--nproc"),
        (&["--nproc", "many", "train"], "many"),
        (&["trian"], "train"),
        (&["--nprocs", "2", "train"], "--nproc"),
        (&["sample", "--checkpoint"], "--checkpoint"),
    ] {
        let done = run(gpurun(words));
        assert_eq!(done.code, 2, "{words:?}: {done:?}");
        assert!(done.stderr.contains(part) && done.stderr.lines().count() == 1, "{words:?}: {done:?}");
    }
}

#[test]
fn checkpoints_that_are_none() {
    let _limit = testkit::time_limit(60);
    let room = Room::new();
    let empty = room.path("empty");
    std::fs::create_dir(&empty).expect("a folder");
    for command in [
        &["sample", "--checkpoint", &empty][..],
        &["export", "--checkpoint", &empty, "--out", &room.path("out")],
        &["--nproc", "2", "train", "--resume", &empty],
    ] {
        let done = run(gpurun(command));
        assert_eq!(done.code, 5, "{command:?}: {done:?}");
        assert!(done.cause().contains(&empty), "{done:?}");
    }
}

#[test]
fn what_does_not_fit_says_what_would() {
    let _limit = testkit::time_limit(60);
    let words = ["train", "--steps", "2", "--seq-len", "64", "--global-batch", "8", "--micro-batch", "1"];
    let with = |nproc: &str, command: &str, extra: &[&str]| {
        let mut line = gpurun(&["--nproc", nproc, command]);
        line.args(&words[1..]).args(extra);
        if command == "plan" {
            line = gpurun(&["--nproc", nproc, "plan"]);
            line.args(&words[3..]);
            line.args(extra);
        }
        run(line)
    };
    let free = with("4", "plan", &["--json"]);
    let free: serde_json::Value = serde_json::from_str(&free.stdout).expect("a JSON object");
    let needed = free["ranks"][0]["device_peak_bytes"].as_u64().expect("bytes");
    let items = free["ranks"][0]["items"].as_array().expect("items");
    let sum: u64 = items.iter().map(|i| i["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!(sum, needed + free["ranks"][0]["host_peak_bytes"].as_u64().expect("bytes"), "the table adds up");
    // A little less than stage 0 needs with the smallest micro-batch.
    let limit = (needed - 1).to_string();
    for command in ["plan", "train"] {
        let done = with("4", command, &["--gpu-memory-limit", &limit]);
        assert_eq!(done.code, 3, "{done:?}");
        for part in ["does not fit", "weights", "largest: ", "it would fit with --zero 1"] {
            assert!(done.stderr.contains(part), "{part}: {done:?}");
        }
    }
    // What was proposed works.
    let done = with("4", "train", &["--gpu-memory-limit", &limit, "--zero", "1"]);
    assert_eq!(done.code, 0, "{done:?}");
    let done = with("1", "plan", &["--gpu-memory-limit", "1KiB"]);
    assert!(done.code == 3 && done.stderr.contains("use more ranks"), "{done:?}");
}

#[test]
fn four_ranks_train_a_model_whose_weights_no_rank_could_hold() {
    let _limit = testkit::time_limit(120);
    let room = Room::new();
    // A chain of many small units: gathered slots are small beside the whole.
    let config = room.file("deep.toml", "[model]\npreset = \"tiny\"\nlayers = 24\n");
    let words = ["--config", &config, "--seq-len", "8", "--micro-batch", "1", "--global-batch", "4"];
    let mut command = gpurun(&["--nproc", "4", "plan", "--json"]);
    command.args(words);
    let plan: serde_json::Value = serde_json::from_str(&run(command).stdout).expect("a JSON object");
    // fp32 weights alone are 4 bytes a parameter; the limit is below that.
    let limit = (4 * plan["parameters"].as_u64().expect("a number") - 1).to_string();
    let train = |zero: &str| {
        let mut command = gpurun(&["--nproc", "4", "train", "--zero", zero, "--offload", "optimizer", "--steps", "2"]);
        command.args(words).args(["--gpu-memory-limit", &limit]);
        run(command)
    };
    assert_eq!(train("2").code, 3, "with whole weights it cannot fit");
    let done = train("3");
    assert!(done.code == 0 && done.stdout.contains("done after step 2"), "{done:?}");
}

#[test]
fn who_steps_a_host_side_adam_is_measured_and_said_once() {
    let _limit = testkit::time_limit(120);
    let train = |more: &[&str]| {
        let mut command =
            gpurun(&["--nproc", "2", "train", "--device", "cpu", "--offload", "optimizer", "--steps", "2"]);
        command.args(["--seq-len", "16", "--eval-every", "0"]).args(more);
        let done = run(command);
        assert_eq!(done.code, 0, "{done:?}");
        let all = format!("{}{}", done.stdout, done.stderr);
        all.matches("--offload-via ").count()
    };
    assert_eq!(train(&[]), 1);
    assert_eq!(train(&["--offload-via", "stream"]), 0);
}

#[test]
fn more_host_memory_than_there_is_is_refused_before_it_is_taken() {
    let _limit = testkit::time_limit(60);
    let room = Room::new();
    // Petabytes: no machine has them, and nothing but a plan is made.
    let config =
        room.file("vast.toml", "[model]\npreset = \"llama-7b\"\nwidth = 1048576\nheads = 8192\nkv_heads = 8192\n");
    let mut command = gpurun(&["--nproc", "2", "train", "--device", "cpu", "--seq-len", "8", "--global-batch", "2"]);
    command.args(["--config", &config]);
    let done = run(command);
    assert_eq!(done.code, 3, "{done:?}");
    for part in ["does not fit: 2 ranks here need ", "of host memory", "weights", "largest: ", "use more ranks"] {
        assert!(done.stderr.contains(part), "{part}: {done:?}");
    }
}
