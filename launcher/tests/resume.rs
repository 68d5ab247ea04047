//! Runs that are interrupted, killed or taken up by other ranks end where an unbroken run ends, to the bit.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use common::{Running, gpurun, run};
use rustix::process::Signal;

fn train(nproc: &str, words: &[&str]) -> Command {
    let mut command = gpurun(&["--nproc", nproc]);
    let fixed = ["train", "--seq-len", "32", "--global-batch", "12", "--micro-batch", "1", "--eval-every", "0"];
    command.args(fixed).args(words);
    command
}

/// Losses by step, with the bits of each number as printed.
fn losses(metrics: &Path) -> BTreeMap<u64, String> {
    let text = std::fs::read_to_string(metrics).expect("metrics were written");
    text.lines()
        .map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).expect("one object a line");
            for field in ["grad_norm", "lr", "tokens", "tokens_per_second", "device_peak_bytes", "step_seconds"] {
                assert!(value[field].is_number(), "{field} in {line}");
            }
            (value["step"].as_u64().expect("a step"), value["loss"].to_string())
        })
        .collect()
}

fn finished(command: Command) {
    let done = run(command);
    assert_eq!(done.code, 0, "{done:?}");
}

/// Every file of a checkpoint, as one run of bytes.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).expect("a checkpoint");
    entries
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .map(|p| (p.file_name().expect("a name").to_string_lossy().into_owned(), std::fs::read(&p).expect("a file")))
        .collect()
}

#[test]
fn a_run_cut_in_two_is_the_unbroken_run() {
    let _limit = testkit::time_limit(120);
    for (zero, moments) in [("0", "fp32"), ("3", "fp32"), ("1", "bf16")] {
        let room = tempfile::tempdir().expect("a folder");
        let at = |name: &str| room.path().join(name).display().to_string();
        let (whole, parts) = (at("whole"), at("parts"));
        let common = ["--zero", zero, "--adam-dtype", moments, "--steps", "8", "--save-every", "4"];
        let launch = |extra: &[&str]| {
            let mut command = train("2", &common);
            command.args(extra);
            finished(command);
        };
        launch(&["--out", &whole, "--metrics", &at("whole.jsonl")]);
        // The schedule must be that of the whole run: the cut is made by throwing the second half away.
        launch(&["--out", &parts, "--metrics", &at("parts.jsonl")]);
        std::fs::remove_dir_all(room.path().join("parts/step-00000008")).expect("the second half is thrown away");
        launch(&["--out", &parts, "--metrics", &at("parts.jsonl"), "--resume", "auto"]);
        assert_eq!(losses(&room.path().join("whole.jsonl")), losses(&room.path().join("parts.jsonl")));
        let last = |dir: &str| contents(&room.path().join(dir).join("step-00000008"));
        assert!(last("whole") == last("parts"), "weights and moments of stage {zero} differ");
    }
}

#[test]
fn moments_of_another_type_are_converted_and_that_is_said() {
    let _limit = testkit::time_limit(120);
    for (first, second, said) in [("fp32", "bf16", "f32"), ("bf16", "fp32", "bf16")] {
        let room = tempfile::tempdir().expect("a folder");
        let at = |name: &str| room.path().join(name).display().to_string();
        let (out, metrics) = (at("out"), at("m.jsonl"));
        let words = |moments: &'static str, steps: &'static str| {
            let words = ["--adam-dtype", moments, "--steps", steps, "--warmup", "0", "--schedule", "constant"];
            words.into_iter().chain(["--out", &out, "--metrics", &metrics, "--resume", "auto"]).collect::<Vec<_>>()
        };
        finished(train("2", &words(first, "10")));
        let size = |step: &str| -> usize { contents(&Path::new(&out).join(step)).values().map(Vec::len).sum() };
        let before = size("step-00000010");
        let done = run(train("2", &words(second, "20")));
        assert_eq!(done.code, 0, "{done:?}");
        let told = format!("adam-dtype was \"{said}\" and is");
        assert!(done.stdout.contains(&told) || done.stderr.contains(&told), "{done:?}");
        let by_step = losses(Path::new(&metrics));
        // Batches differ in difficulty, so some steps together.
        let mean = |steps: std::ops::RangeInclusive<u64>| {
            steps.map(|step| by_step[&step].parse::<f64>().expect("a number")).sum::<f64>() / 5.0
        };
        assert!(mean(16..=20) < mean(1..=5), "training goes on: {by_step:?}");
        // Master, m and v: 12 bytes, or 8.
        let ratio = size("step-00000020") as f64 / before as f64;
        let want = if second == "bf16" { 8.0 / 12.0 } else { 12.0 / 8.0 };
        assert!((ratio - want).abs() < 0.02 * want, "a checkpoint is {ratio} times as large");
    }
}

#[test]
fn the_number_of_ranks_may_change_on_the_way() {
    let _limit = testkit::time_limit(120);
    let room = tempfile::tempdir().expect("a folder");
    let at = |name: &str| room.path().join(name).display().to_string();
    let words = |out: &str, metrics: &str, extra: &[&str]| -> Vec<String> {
        let fixed = ["--steps", "6", "--save-every", "3", "--out", out, "--metrics", metrics];
        fixed.iter().chain(extra).map(ToString::to_string).collect()
    };
    let launch = |nproc: &str, words: Vec<String>| {
        finished(train(nproc, &words.iter().map(String::as_str).collect::<Vec<_>>()));
    };
    launch("1", words(&at("one"), &at("one.jsonl"), &[]));
    let want = losses(&room.path().join("one.jsonl"));
    for (first, second, zero) in [("4", "1", "3"), ("1", "3", "2"), ("2", "4", "1")] {
        let (out, metrics) = (at(&format!("{first}{second}")), at(&format!("{first}{second}.jsonl")));
        launch(first, words(&out, &metrics, &["--zero", zero, "--offload", "optimizer"]));
        std::fs::remove_dir_all(Path::new(&out).join("step-00000006")).expect("the second half is thrown away");
        launch(second, words(&out, &metrics, &["--resume", "auto"]));
        let got = losses(Path::new(&metrics));
        assert_eq!(got.len(), 6);
        for (step, loss) in &want {
            let (a, b): (f64, f64) = (loss.parse().expect("a number"), got[step].parse().expect("a number"));
            // Twelve sequences added in another order, in fp32.
            assert!((a - b).abs() < 1e-4 * a, "{first} then {second} ranks, step {step}: {a} and {b}");
        }
    }
}

#[test]
fn a_rank_killed_while_it_saves_leaves_the_last_checkpoint_whole() {
    let _limit = testkit::time_limit(120);
    let room = tempfile::tempdir().expect("a folder");
    let out = room.path().join("out").display().to_string();
    let metrics = room.path().join("m.jsonl").display().to_string();
    let words = ["--steps", "100000", "--save-every", "1", "--out", &out, "--metrics", &metrics, "--resume", "auto"];
    for round in 0..3 {
        let mut running = Running::start(train("2", &words));
        running.wait_for("checkpoint of step");
        running.wait_for("checkpoint of step");
        // Saving takes most of the time here, so the kill falls into a save or beside one.
        let child = running.child.id();
        let children = std::fs::read_to_string(format!("/proc/{child}/task/{child}/children")).expect("children");
        let victim = children.split_whitespace().find(|pid| {
            let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            variables.split(|b| *b == 0).any(|v| v == format!("RANK={}", round % 2).as_bytes())
        });
        let pid = victim.expect("the rank").parse().expect("a number");
        let pid = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(pid, Signal::KILL).expect("killed");
        let done = running.finish();
        assert_eq!(done.code, 4, "{done:?}");
        assert!(done.cause().starts_with(&format!("rank {} was killed by SIGKILL", round % 2)), "{done:?}");
    }
    // What was learned by three lives is what one life learns.
    let seen = losses(Path::new(&metrics));
    let steps = seen.len() as u64;
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), (1..=steps).collect::<Vec<_>>(), "each step stands once");
    let whole = room.path().join("w.jsonl").display().to_string();
    let mut running = Running::start(train("2", &["--steps", "100000", "--metrics", &whole]));
    let upto = losses_until(Path::new(&whole), steps, &mut running);
    for (step, loss) in &seen {
        assert_eq!(&upto[step], loss, "step {step}");
    }
    assert!(std::fs::read_dir("/dev/shm").map_or(0, Iterator::count) < 100, "nothing with a name is left behind");
}

/// Lets a run go on until its metrics hold `steps` steps, then stops it.
fn losses_until(metrics: &Path, steps: u64, running: &mut Running) -> BTreeMap<u64, String> {
    loop {
        let seen = std::fs::read_to_string(metrics).map_or(0, |t| t.matches('\n').count() as u64);
        if seen >= steps {
            break;
        }
        std::thread::yield_now();
    }
    running.signal(Signal::INT);
    let status = running.child.wait().expect("it ends");
    assert_eq!(status.code(), Some(130));
    losses(metrics)
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let _limit = testkit::time_limit(60);
    let room = tempfile::tempdir().expect("a folder");
    let out = room.path().join("out").display().to_string();
    finished(train("2", &["--steps", "4", "--save-every", "2", "--out", &out]));
    let newest = room.path().join("out/step-00000004");
    let file = newest.join("rank-1.safetensors");
    let mut bytes = std::fs::read(&file).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).expect("written");
    let done = run(train("2", &["--steps", "4", "--out", &out, "--resume", "auto"]));
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stdout.contains("passed over") && done.stdout.contains("rank-1.safetensors"), "{done:?}");
    assert!(done.stdout.contains("resuming after step 2"), "{done:?}");
    // Asked for by name, it is refused.
    let file = newest.join("rank-0.safetensors");
    let bytes = std::fs::read(&file).expect("a file");
    std::fs::write(&file, &bytes[..bytes.len() - 10]).expect("written");
    let done = run(train("2", &["--steps", "6", "--resume", newest.to_str().expect("a path")]));
    assert_eq!(done.code, 5, "{done:?}");
    assert!(done.cause().contains("rank-0.safetensors"), "{done:?}");
}

#[test]
fn a_trained_model_speaks_and_is_exported() {
    let _limit = testkit::time_limit(120);
    let room = tempfile::tempdir().expect("a folder");
    let at = |name: &str| room.path().join(name).display().to_string();
    std::fs::write(room.path().join("text.txt"), "abcdefgh".repeat(2000)).expect("a text");
    let words = ["--data", &at("text.txt"), "--steps", "150", "--out", &at("out"), "--lr", "3e-3"];
    finished(train("2", &words));
    let sample = |extra: &[&str]| {
        let mut command = gpurun(&["sample", "--checkpoint", &at("out"), "--prompt", "abcdefghabc", "--tokens", "13"]);
        command.args(extra);
        run(command)
    };
    let done = sample(&["--temperature", "0"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "abcdefghabcdefghabcdefgh\n"), "{done:?}");
    assert_eq!(sample(&["--seed", "3"]).stdout, sample(&["--seed", "3"]).stdout, "a seed gives one text");
    let done = run(gpurun(&["export", "--checkpoint", &at("out"), "--out", &at("hf"), "--dtype", "fp32"]));
    assert_eq!(done.code, 0, "{done:?}");
    // What was exported can be trained on: its first loss is that of the trained model.
    let mut command =
        gpurun(&["--nproc", "2", "train", "--model", &at("hf"), "--data", &at("text.txt"), "--steps", "1"]);
    command.args(["--seq-len", "32", "--global-batch", "12", "--metrics", &at("hf.jsonl")]);
    finished(command);
    let loss: f64 = losses(&room.path().join("hf.jsonl"))[&1].parse().expect("a number");
    assert!(loss < 0.5, "the exported weights know the text: {loss}");
}
