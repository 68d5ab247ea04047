//! The built-in `train` under the launcher: its end, its death, its interruption and its second life.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;

use common::{Running, gpurun, run};
use rustix::process::{Pid, Signal};

/// A model small enough that a step takes milliseconds, on the text inside the executable.
fn train(options: &[&str], words: &[&str]) -> Command {
    let mut command = gpurun(options);
    command.args(["train", "--seq-len", "32", "--global-batch", "4", "--micro-batch", "1"]).args(words);
    command
}

/// The process of a rank: a child of the launcher with that rank in its environment.
fn process_of(running: &Running, rank: u32) -> Pid {
    let launcher = running.child.id();
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let wanted = format!("RANK={rank}");
    let is_wanted = |pid: &&str| {
        let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    let pid = children.split_whitespace().find(is_wanted).unwrap_or_else(|| panic!("no rank {rank} in {children}"));
    Pid::from_raw(pid.parse().unwrap()).unwrap()
}

#[test]
fn two_ranks_train_to_the_end() {
    let _limit = testkit::time_limit(60);
    let done = run(train(&["--nproc", "2"], &["--steps", "4"]));
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{done:?}");
    assert!(done.stdout.contains("step 4/4  loss ") && done.stdout.contains("done after step 4"), "{done:?}");
}

#[test]
fn a_wrong_option_is_one_line() {
    let _limit = testkit::time_limit(30);
    let done = run(train(&["--nproc", "2"], &["--stepz", "4"]));
    assert_eq!(done.code, 2, "{done:?}");
    assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
    assert!(done.cause().contains("'--stepz'") && done.cause().contains("'--steps'"), "{done:?}");
}

#[test]
fn a_killed_and_a_stopped_rank_are_named_with_their_instruction() {
    let _limit = testkit::time_limit(60);
    for (signal, code, cause) in [
        (Signal::KILL, 4, "rank 1 was killed by SIGKILL "),
        (Signal::STOP, 6, "rank 1 has been stopped (SIGSTOP) for "),
    ] {
        let mut running = Running::start(train(&["--nproc", "2", "--hang-timeout", "2"], &["--steps", "100000"]));
        running.wait_for("step 3/");
        rustix::process::kill_process(process_of(&running, 1), signal).unwrap();
        let done = running.finish();
        assert_eq!(done.code, code, "{done:?}");
        assert!(done.cause().starts_with(cause) && done.cause().contains(" step "), "{done:?}");
    }
}

#[test]
fn an_interrupted_run_leaves_a_checkpoint_and_goes_on_from_it() {
    let _limit = testkit::time_limit(60);
    let out = tempfile::tempdir().unwrap();
    let words = ["--steps", "100000", "--out", out.path().to_str().unwrap(), "--resume", "auto"];
    let mut running = Running::start(train(&["--nproc", "2"], &words));
    running.wait_for("step 3/");
    running.signal(Signal::TERM);
    let done = running.finish();
    assert_eq!(done.code, 143, "{done:?}");
    let step: u64 = common::number_in(&done.stdout.replace("stopped after step ", "stopped="), "stopped") as u64;
    assert!(done.stdout.contains(&format!("checkpoint of step {step}: ")), "{done:?}");

    let mut running = Running::start(train(&["--nproc", "2"], &words));
    running.wait_for(&format!("resuming after step {step} "));
    running.wait_for(&format!("step {}/", step + 1));
    running.signal(Signal::INT);
    assert_eq!(running.finish().code, 130);
}

#[test]
fn a_killed_run_goes_on_from_its_last_checkpoint() {
    let _limit = testkit::time_limit(60);
    let out = tempfile::tempdir().unwrap();
    let words = ["--steps", "60", "--save-every", "2", "--out", out.path().to_str().unwrap()];
    let mut running = Running::start(train(&["--nproc", "2", "--max-restarts", "1"], &words));
    running.wait_for("checkpoint of step 4:");
    rustix::process::kill_process(process_of(&running, 0), Signal::KILL).unwrap();
    running.wait_for("resuming after step ");
    let done = running.finish();
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.cause().contains("rank 0 was killed by SIGKILL") && done.cause().contains("(1 of 1)"), "{done:?}");
    assert!(done.stdout.contains("done after step 60"), "{done:?}");
}
