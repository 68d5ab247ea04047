//! Any executable as the program: variables, output, exit codes, ends.

mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use common::{Running, Watched, gpurun, gpurun_sh, number_in, run};
use rustix::process::Signal;

#[test]
fn variables_of_each_rank() {
    let _limit = testkit::time_limit(30);
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR; echo port=$MASTER_PORT; \
                  echo omp=${OMP_NUM_THREADS-unset} threads=$((GPURUN_THREADS >= 1))";
    let done = run(gpurun_sh(&["--nproc", "3"], script));
    assert_eq!(done.code, 0, "{done:?}");
    let mut ports = BTreeSet::new();
    for rank in 0..3 {
        let lines = done.lines_of(rank);
        assert!(lines.contains(format!("{rank} {rank} 3 3 127.0.0.1").as_str()), "{done:?}");
        assert!(lines.contains("omp=unset threads=1"), "{done:?}");
        ports.extend(
            lines.iter().filter_map(|line| line.strip_prefix("port=")).map(|port| port.parse::<u16>().unwrap()),
        );
    }
    assert_eq!(ports.len(), 1, "one free port for all: {done:?}");
    assert!(!ports.contains(&0));
}

#[test]
fn one_worker_unless_told_otherwise_and_flags_before_variables() {
    let _limit = testkit::time_limit(30);
    assert_eq!(run(gpurun_sh(&[], "echo $WORLD_SIZE")).stdout, "[rank 0] 1\n");
    let mut command = gpurun_sh(&[], "echo $WORLD_SIZE");
    command.env("PET_NPROC_PER_NODE", "2").env("PET_NNODES", "1").env("PET_NODE_RANK", "0");
    let mut lines: Vec<String> = run(command).stdout.lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] 2", "[rank 1] 2"]);
    let mut command = gpurun_sh(&["--nproc", "1"], "echo $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT");
    command.env("PET_NPROC_PER_NODE", "2").env("PET_MASTER_ADDR", "localhost").env("PET_MASTER_PORT", "1234");
    assert_eq!(run(command).stdout, "[rank 0] 1 at localhost:1234\n");
    let mut command = gpurun_sh(&[], "[ $GPURUN_RESTART = 1 ]");
    command.env("PET_MAX_RESTARTS", "1");
    assert_eq!(run(command).code, 0);
    let mut command = gpurun_sh(&[], "true");
    command.env("PET_NNODES", "2");
    let done = run(command);
    assert_eq!(done.code, 2);
    assert!(done.cause().contains("PET_NNODES=2"), "{done:?}");
    let auto = run(gpurun_sh(&["--nproc", "auto", "--no-prefix"], "echo $WORLD_SIZE"));
    assert!(auto.code == 0 && auto.stdout.lines().count() >= 1, "{auto:?}");
}

#[test]
fn mistakes_are_one_line_and_exit_2() {
    let _limit = testkit::time_limit(30);
    for (words, said) in [
        (&["--nproc", "0", "true"][..], "at least 1"),
        (&["--nproc", "x", "true"], "auto"),
        (&["no-such-program-anywhere"], "no program no-such-program-anywhere"),
        (&["trian"], "did you mean `train`?"),
        (&["--nproc", "2", "sample"], "--nproc means nothing to `sample`"),
        (&["./no-such-file"], "cannot run ./no-such-file"),
        (&["--nprok", "2", "true"], "'--nproc'"),
        (&[], "PROGRAM"),
        (&["--log-dir", "/proc/nowhere", "true"], "/proc/nowhere"),
    ] {
        let done = run(gpurun(words));
        assert_eq!(done.code, 2, "{words:?}: {done:?}");
        assert_eq!(done.stderr.lines().count(), 1, "{words:?}: {done:?}");
        assert!(done.cause().contains(said), "{words:?}: {done:?}");
    }
}

#[test]
fn half_a_place_is_no_place() {
    let _limit = testkit::time_limit(30);
    let mut command = gpurun(&["train"]);
    command.env("RANK", "1");
    let done = run(command);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.cause().contains("RANK is set, but WORLD_SIZE is not"), "{done:?}");
}

#[test]
fn help_comes_once() {
    let _limit = testkit::time_limit(30);
    let done = run(gpurun(&["--help"]));
    assert_eq!(done.code, 0);
    assert!(done.stdout.contains("--nproc") && done.stdout.contains("  train  "), "{done:?}");
    let done = run(gpurun(&["--nproc", "2", "train", "--help"]));
    assert_eq!((done.code, done.stdout.matches("Usage:").count()), (0, 1), "{done:?}");
    assert!(!done.stdout.contains("[rank"), "{done:?}");
    assert!(run(gpurun(&["--version"])).stdout.starts_with("gpurun "));
}

#[test]
fn scripts_with_and_without_interpreter() {
    let _limit = testkit::time_limit(30);
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    let run_script = |text: &str| {
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        run(gpurun(&["--nproc", "2", script.to_str().unwrap(), "word"]))
    };
    let done = run_script("#!/bin/sh\necho $0 $1 $RANK\n");
    for rank in 0..2 {
        assert!(done.lines_of(rank).contains(format!("{} word {rank}", script.display()).as_str()), "{done:?}");
    }
    let done = run_script("#!/no/such/interpreter\n");
    assert_eq!(done.code, 2, "{done:?}");
    assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
    assert!(done.cause().contains("interpreter"), "{done:?}");
}

#[test]
fn an_exit_code_is_the_first_cause_and_ends_the_others() {
    let _limit = testkit::time_limit(30);
    // Rank 0 does not want to end.
    let script = "trap '' TERM; if [ $RANK = 1 ]; then exit 7; fi; sleep 1000 & wait; sleep 1000";
    let done = run(gpurun_sh(&["--nproc", "3"], script));
    assert_eq!(done.code, 4, "{done:?}");
    assert_eq!(done.cause(), "rank 1 exited with code 7", "{done:?}");
    assert!(done.seconds < 2.0 + 1.0, "{done:?}");
    assert!(done.report().last().unwrap().contains("exit 4"), "{done:?}");
}

#[test]
fn a_killed_rank_is_named_even_when_others_fail_in_turn() {
    let _limit = testkit::time_limit(30);
    let script = "if [ $RANK = 2 ]; then kill -9 $$; fi; trap 'exit 1' TERM; sleep 1000 & wait";
    let done = run(gpurun_sh(&["--nproc", "3"], script));
    assert_eq!(done.code, 4, "{done:?}");
    assert_eq!(done.cause(), "rank 2 was killed by SIGKILL", "{done:?}");
    assert!(done.seconds < 2.0, "{done:?}");
}

#[test]
fn nothing_of_the_last_words_is_lost() {
    let _limit = testkit::time_limit(60);
    let logs = tempfile::tempdir().unwrap();
    // A megabyte in one line, then words without an end, on both streams, and a violent death.
    let script = "head -c 1048576 /dev/zero | tr '\\0' x; printf '\\nlast words of rank %s' $RANK; \
                  printf 'and of its errors' >&2; kill -9 $$";
    let done = run(gpurun_sh(&["--nproc", "2", "--log-dir", logs.path().to_str().unwrap()], script));
    assert_eq!(done.code, 4);
    // One of the two may be ended by the launcher before it is done; the first cause is not.
    let rank = number_in(&done.cause().replace("rank ", "rank="), "rank");
    let prefix = format!("[rank {rank}] ");
    let lines: Vec<&str> = done.stdout.lines().filter_map(|line| line.strip_prefix(prefix.as_str())).collect();
    assert_eq!(lines.iter().map(|line| line.matches('x').count()).sum::<usize>(), 1 << 20);
    assert_eq!(lines.last().copied(), Some(format!("last words of rank {rank}").as_str()));
    assert!(done.stderr.contains(&format!("[rank {rank}] and of its errors\n")), "{}", done.stderr);
    let log = std::fs::read_to_string(logs.path().join(format!("rank-{rank}.log"))).unwrap();
    assert_eq!(log.matches('x').count(), 1 << 20);
    let last = format!("last words of rank {rank}");
    assert!(log.lines().any(|line| line == last) && log.lines().any(|line| line == "and of its errors"));
}

#[test]
fn what_a_rank_leaves_behind_may_still_speak_and_then_dies() {
    let _limit = testkit::time_limit(30);
    let done = run(gpurun_sh(&[], "exec > >(while read line; do echo \"through a pipe: $line\"; done); echo hello"));
    assert_eq!(done.stdout, "[rank 0] through a pipe: hello\n", "{done:?}");

    let mut running = Running::start(gpurun_sh(&[], "sleep 1000 & echo left=$!"));
    let left = Watched::new(number_in(&running.wait_for("left="), "left"));
    let done = running.finish();
    assert_eq!(done.code, 0, "{done:?}");
    assert!(left.is_gone_within(Duration::from_secs(5)), "a process outlived its job");
}

#[test]
fn a_process_that_left_its_group_dies_with_the_job() {
    let _limit = testkit::time_limit(30);
    let script = "setsid sh -c 'echo left=$$; sleep 1000' > $0 2>&1 < /dev/null & \
                  while ! grep -q left= $0; do sleep 0.01; done; cat $0";
    let folder = tempfile::tempdir().unwrap();
    let mut command = gpurun_sh(&[], script);
    command.arg(folder.path().join("note"));
    let mut running = Running::start(command);
    let left = Watched::new(number_in(&running.wait_for("left="), "left"));
    assert_eq!(running.finish().code, 0);
    assert!(left.is_gone_within(Duration::from_secs(5)), "a process outlived its job");
}

#[test]
fn an_ignored_signal_stays_ignored() {
    let _limit = testkit::time_limit(30);
    // As under nohup.
    let mut command = std::process::Command::new("sh");
    let script = "trap '' HUP; exec \"$0\" --nproc 1 bash -c 'echo ready; read line < \"$0\"; echo done' \"$1\"";
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
    command.args(["-c", script, common::GPURUN]).arg(&gate);
    let mut running = Running::start(command);
    running.wait_for("ready");
    running.signal(Signal::HUP);
    std::fs::write(&gate, "go\n").unwrap();
    let done = running.finish();
    assert_eq!((done.code, done.stdout.lines().last()), (0, Some("[rank 0] done")), "{done:?}");
}

#[test]
fn logs_are_kept_where_they_are_wanted() {
    let _limit = testkit::time_limit(30);
    let folder = tempfile::tempdir().unwrap();
    let temporary = folder.path().join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let entries = || std::fs::read_dir(&temporary).unwrap().count();
    let with_tmp = |script: &str| {
        let mut command = gpurun_sh(&["--nproc", "2"], script);
        command.env("TMPDIR", &temporary);
        run(command)
    };
    assert_eq!(with_tmp("echo fine").code, 0);
    assert_eq!(entries(), 0, "the temporary logs of a good run are removed");
    let done = with_tmp("echo words of $RANK; sleep 0.2; exit 1");
    assert_eq!(entries(), 1, "those of a bad run are kept");
    let shown = done.report().last().unwrap().split("logs: ").nth(1).unwrap().replace('*', "1");
    assert_eq!(std::fs::read_to_string(shown).unwrap(), "words of 1\n");

    let chosen = folder.path().join("a/b");
    let done = run(gpurun_sh(&["--log-dir", chosen.to_str().unwrap()], "echo once"));
    assert_eq!(done.code, 0);
    assert_eq!(std::fs::read_to_string(chosen.join("rank-0.log")).unwrap(), "once\n");
}

#[test]
fn no_descriptor_leaks_into_a_program() {
    let _limit = testkit::time_limit(30);
    let list = "for fd in /proc/$$/fd/*; do n=${fd##*/}; echo fd=$n $(readlink $fd); done";
    let bare = std::process::Command::new("bash").args(["-c", list]).output().unwrap();
    let numbers = |text: &str| -> BTreeSet<i32> {
        text.lines().filter(|line| line.contains("fd=")).map(|line| number_in(line, "fd")).collect()
    };
    let before = numbers(&String::from_utf8(bare.stdout).unwrap());
    let script = format!("echo named=$GPURUN_SHM_FD. named=$GPURUN_POSITIONS_FD.; {list}");
    let done = run(gpurun_sh(&["--nproc", "2"], &script));
    for rank in 0..2 {
        let lines: Vec<&str> = done.lines_of(rank).into_iter().collect();
        let text = lines.join("\n");
        let named: BTreeSet<i32> = ["GPURUN_SHM_FD", "GPURUN_POSITIONS_FD"]
            .iter()
            .enumerate()
            .map(|(index, _)| {
                let line = lines.iter().find(|line| line.starts_with("named=")).unwrap();
                line.split("named=").nth(index + 1).unwrap().split('.').next().unwrap().parse().unwrap()
            })
            .collect();
        let extra: BTreeSet<i32> = numbers(&text).difference(&before).copied().collect();
        assert_eq!(extra, named, "rank {rank}: {text}");
    }
}

#[test]
fn restarts_are_counted_and_limited() {
    let _limit = testkit::time_limit(30);
    let done = run(gpurun_sh(&["--max-restarts", "2"], "echo try $GPURUN_RESTART; exit 9"));
    assert_eq!(done.code, 4, "{done:?}");
    assert_eq!(done.stdout, "[rank 0] try 0\n[rank 0] try 1\n[rank 0] try 2\n");
    assert_eq!(done.cause(), "rank 0 exited with code 9; starting again (1 of 2)");
}

#[test]
fn interrupts_reach_the_program_and_show_in_the_exit_code() {
    let _limit = testkit::time_limit(30);
    for (signal, name, code) in [(Signal::TERM, "TERM", 143), (Signal::INT, "INT", 130), (Signal::HUP, "HUP", 129)] {
        let script = format!("trap 'echo got {name}; exit 0' {name}; echo ready; while true; do sleep 0.05; done");
        let mut running = Running::start(gpurun_sh(&["--nproc", "2"], &script));
        running.wait_for("ready");
        running.wait_for("ready");
        running.signal(signal);
        let done = running.finish();
        assert_eq!(done.code, code, "{done:?}");
        for rank in 0..2 {
            assert!(done.lines_of(rank).contains(format!("got {name}").as_str()), "{done:?}");
        }
        assert!(done.cause().contains("interrupted by SIG"), "{done:?}");
    }
}

#[test]
fn a_second_interrupt_kills_and_the_grace_time_ends() {
    let _limit = testkit::time_limit(30);
    let script = "trap 'echo no' INT TERM; echo ready; while true; do sleep 0.05; done";
    let mut running = Running::start(gpurun_sh(&[], script));
    running.wait_for("ready");
    running.signal(Signal::INT);
    running.wait_for("no");
    running.signal(Signal::INT);
    let done = running.finish();
    assert_eq!(done.code, 130, "{done:?}");
    assert!(done.seconds < 10.0, "{done:?}");

    let mut running = Running::start(gpurun_sh(&["--grace", "0.5"], script));
    running.wait_for("ready");
    running.signal(Signal::TERM);
    let done = running.finish();
    assert_eq!(done.code, 143, "{done:?}");
    assert!(done.seconds < 5.0, "{done:?}");
    assert!(done.stderr.contains("rank 0 did not end in time and was killed"), "{done:?}");
}

#[test]
fn a_stopped_program_is_named() {
    let _limit = testkit::time_limit(30);
    let script = "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 1000";
    let done = run(gpurun_sh(&["--nproc", "2", "--hang-timeout", "1"], script));
    assert_eq!(done.code, 6, "{done:?}");
    assert!(done.cause().starts_with("rank 1 has been stopped (SIGSTOP) for 1 s"), "{done:?}");
}

#[test]
fn a_killed_launcher_leaves_no_orphan() {
    let _limit = testkit::time_limit(30);
    // A child of the rank stays in its group.
    let script = "sleep 1000 & echo rank=$$. child=$!.; wait";
    let mut running = Running::start(gpurun_sh(&["--nproc", "2"], script));
    let lines = [running.wait_for("child="), running.wait_for("child=")];
    let watched: Vec<Watched> = lines
        .iter()
        .flat_map(|line| [Watched::new(number_in(line, "rank")), Watched::new(number_in(line, "child"))])
        .collect();
    running.signal(Signal::KILL);
    running.child.wait().unwrap();
    for process in watched {
        assert!(process.is_gone_within(Duration::from_secs(5)), "an orphan is left");
    }
}
