//! Programs that take part in the launcher's protocol: positions, first causes, hangs, stops, restarts, and workers that no
//! launcher started.

#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;

use common::{Done, Running, barrier_job, gpurun, run};
use rustix::process::{Pid, Signal};

fn job(options: &[&str], words: &[&str]) -> Command {
    let mut command = gpurun(options);
    command.arg(barrier_job()).args(words);
    command
}

#[test]
fn a_good_run_shows_progress_and_its_summary() {
    let _limit = testkit::time_limit(30);
    let done = run(job(&["--nproc", "3"], &["--steps", "20"]));
    assert_eq!(done.code, 0, "{done:?}");
    let lines: Vec<&str> = done.stdout.lines().collect();
    assert!(lines[0].starts_with("step 1/20  loss 5.0000  norm 1.000  lr 1.000e-3  "), "{done:?}");
    assert!(lines.iter().any(|line| line.starts_with("step 20/20  loss 0.2500")), "{done:?}");
    assert_eq!(lines.last().copied(), Some("finished 20 steps on 3 ranks, start 0"));
    assert_eq!(done.stderr, "");
}

/// Where the fault is: step 3, instruction 1.
const THERE: &str = "in step 3, instruction 1 (backward h.0)";

fn with_fault(what: &str) -> Done {
    run(job(&["--nproc", "3", "--hang-timeout", "1.5"], &["--steps", "6", "--fault", &format!("1:3:{what}")]))
}

#[test]
fn the_first_cause_has_rank_step_and_instruction() {
    let _limit = testkit::time_limit(60);
    for (what, code, cause) in [
        ("kill", 4, format!("rank 1 was killed by SIGKILL {THERE}")),
        ("abort", 4, format!("rank 1 was killed by SIGABRT {THERE}")),
        ("exit:9", 4, format!("rank 1 exited with code 9 {THERE}")),
        ("exit:3", 3, format!("rank 1 exited with code 3 {THERE}")),
        ("error:4", 4, format!("rank 1 failed {THERE}: as the fault says")),
        ("error:3", 3, format!("rank 1 failed {THERE}: as the fault says")),
        ("error:5", 5, format!("rank 1 failed {THERE}: as the fault says")),
        ("error:7", 7, format!("rank 1 failed {THERE}: as the fault says")),
        ("error:2", 2, "as the fault says".to_owned()),
        ("panic", 4, format!("rank 1 panicked {THERE}: as the fault says (at ")),
    ] {
        let done = with_fault(what);
        assert_eq!(done.code, code, "{what}: {done:?}");
        assert_eq!(done.cause().replace(" (core dumped)", "").find(&cause), Some(0), "{what}: {done:?}");
        assert!(done.seconds < 2.0, "{what}: {done:?}");
    }
}

#[test]
fn a_hung_rank_is_named_with_what_it_is_in() {
    let _limit = testkit::time_limit(60);
    for (what, cause) in [("stop", "rank 1 has been stopped (SIGSTOP) for "), ("spin", "rank 1 has not moved for ")] {
        let done = with_fault(what);
        assert_eq!(done.code, 6, "{what}: {done:?}");
        assert!(done.cause().starts_with(cause), "{what}: {done:?}");
        assert!(done.cause().ends_with(THERE), "{what}: {done:?}");
        assert!(done.seconds < 1.5 + 3.0, "{what}: {done:?}");
    }
}

#[test]
fn ranks_that_share_memory_notice_a_death_at_once() {
    let _limit = testkit::time_limit(30);
    let done = run(job(&["--nproc", "3"], &["--over", "memory", "--steps", "20"]));
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{done:?}");
    let words = ["--over", "memory", "--steps", "6", "--fault", "1:3:kill"];
    let done = run(job(&["--nproc", "3"], &words));
    assert_eq!(done.code, 4, "{done:?}");
    assert_eq!(done.cause(), format!("rank 1 was killed by SIGKILL {THERE}"), "{done:?}");
    assert!(done.seconds < 2.0, "{done:?}");
}

#[test]
fn long_tasks_show_their_progress() {
    let _limit = testkit::time_limit(30);
    let done = run(job(&["--nproc", "2"], &["--tokens", "50", "--steps", "1"]));
    assert_eq!(done.code, 0, "{done:?}");
    let lines: Vec<&str> = done.stdout.lines().take(3).collect();
    assert_eq!(lines[..2], ["tokenising  0 %", "tokenising  100 %"], "{done:?}");
    assert!(lines[2].starts_with("step 1/1"), "{done:?}");
}

#[test]
fn a_wrong_option_is_said_once() {
    let _limit = testkit::time_limit(30);
    let done = run(job(&["--nproc", "3"], &["--stepz", "3"]));
    assert_eq!(done.code, 2, "{done:?}");
    assert_eq!(done.stderr, "gpurun: unknown option --stepz\n");
    assert_eq!(done.stdout, "");
}

#[test]
fn interrupts_stop_at_a_step_boundary_with_a_checkpoint() {
    let _limit = testkit::time_limit(60);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let out = tempfile::tempdir().unwrap();
        let words = ["--steps", "100000", "--step-millis", "10", "--out", out.path().to_str().unwrap()];
        let mut running = Running::start(job(&["--nproc", "2"], &words));
        running.wait_for("step 2/");
        running.signal(signal);
        let done = running.finish();
        assert_eq!(done.code, code, "{done:?}");
        let step: u64 = std::fs::read_to_string(out.path().join("step")).unwrap().parse().unwrap();
        assert!(done.stdout.contains(&format!("checkpoint of step {step}: {}", out.path().display())), "{done:?}");
        assert!(done.stdout.contains(&format!("stopped after step {step}")), "{done:?}");
        assert!(done.cause().starts_with("interrupted by SIG"), "{done:?}");
        assert!(done.seconds < 10.0, "{done:?}");
    }
}

#[test]
fn a_failed_job_is_started_again_and_a_wrong_one_is_not() {
    let _limit = testkit::time_limit(30);
    let done = run(job(&["--nproc", "2", "--max-restarts", "3"], &["--fault", "0:2:kill"]));
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stdout.ends_with("finished 5 steps on 2 ranks, start 1\n"), "{done:?}");
    assert_eq!(
        done.cause(),
        "rank 0 was killed by SIGKILL in step 2, instruction 1 (backward h.0); starting again (1 of 3)"
    );
    for (what, code) in [("error:2", 2), ("error:3", 3), ("error:5", 5), ("error:7", 7)] {
        let done = run(job(&["--nproc", "2", "--max-restarts", "3"], &["--fault", &format!("0:2:{what}")]));
        assert_eq!(done.code, code, "{done:?}");
        assert!(!done.stderr.contains("starting again"), "{done:?}");
    }
}

/// Starts ranks as a job manager does, without a launcher.
fn unlaunched(world: u32, words: &[&str], variables: impl Fn(u32) -> Vec<(&'static str, String)>) -> Vec<Running> {
    let start = |rank| {
        let mut command = Command::new(barrier_job());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["GPURUN_", "SLURM_", "OMPI_", "PMIX_"].iter().any(|start| text.starts_with(start)) {
                command.env_remove(&name);
            }
        }
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        Running::start({
            command.args(words).envs(variables(rank));
            command
        })
    };
    // The last rank first: whoever comes early waits for rank 0.
    let mut ranks: Vec<Running> = (0..world).rev().map(start).collect();
    ranks.reverse();
    ranks
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn manager(kind: &str) -> Box<dyn Fn(u32) -> Vec<(&'static str, String)>> {
    let unique = format!("{}-{}", std::process::id(), free_port());
    match kind {
        "slurm" => Box::new(move |rank| {
            vec![
                ("SLURM_PROCID", rank.to_string()),
                ("SLURM_NTASKS", "3".into()),
                ("SLURM_LOCALID", rank.to_string()),
                ("SLURM_JOB_ID", unique.clone()),
            ]
        }),
        "mpi" => Box::new(move |rank| {
            vec![
                ("OMPI_COMM_WORLD_RANK", rank.to_string()),
                ("OMPI_COMM_WORLD_SIZE", "3".into()),
                ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "3".into()),
                ("PMIX_NAMESPACE", unique.clone()),
            ]
        }),
        _ => {
            let port = free_port().to_string();
            Box::new(move |rank| {
                vec![
                    ("RANK", rank.to_string()),
                    ("WORLD_SIZE", "3".into()),
                    ("MASTER_ADDR", "localhost".into()),
                    ("MASTER_PORT", port.clone()),
                ]
            })
        }
    }
}

#[test]
fn job_managers_need_no_launcher() {
    let _limit = testkit::time_limit(60);
    for (kind, over) in [("slurm", "store"), ("mpi", "memory"), ("kubernetes", "memory")] {
        let ranks: Vec<Done> =
            unlaunched(3, &["--steps", "20", "--over", over], manager(kind)).into_iter().map(Running::finish).collect();
        assert!(ranks.iter().all(|done| done.code == 0), "{kind}: {ranks:?}");
        assert!(ranks[0].stdout.contains("step 20/20  loss 0.2500"), "{kind}: {ranks:?}");
        assert!(ranks[0].stdout.ends_with("finished 20 steps on 3 ranks, start 0\n"), "{kind}: {ranks:?}");
        assert_eq!(ranks[1].stdout, "", "{kind}");
    }
}

#[test]
fn without_a_launcher_a_lost_rank_ends_the_others() {
    let _limit = testkit::time_limit(60);
    for lost in [0, 2] {
        let mut ranks = unlaunched(3, &["--steps", "100000", "--step-millis", "5"], manager("kubernetes"));
        ranks[0].wait_for("step 2/");
        rustix::process::kill_process(Pid::from_child(&ranks[lost].child), Signal::KILL).unwrap();
        let status = ranks.remove(lost).child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        for done in ranks.into_iter().map(Running::finish) {
            assert_eq!(done.code, 4, "{done:?}");
            assert!(done.seconds < 20.0, "{done:?}");
        }
    }
}

#[test]
fn without_a_launcher_signals_stop_at_a_step_boundary() {
    let _limit = testkit::time_limit(60);
    let out = tempfile::tempdir().unwrap();
    let words = ["--steps", "100000", "--step-millis", "5", "--out", out.path().to_str().unwrap()];
    let mut ranks = unlaunched(3, &words, manager("kubernetes"));
    ranks[0].wait_for("step 2/");
    // A job manager sends its signal to all; rank 0's word counts here.
    for rank in &ranks {
        rank.signal(Signal::TERM);
    }
    for done in ranks.into_iter().map(Running::finish) {
        assert_eq!(done.code, 143, "{done:?}");
    }
    assert!(out.path().join("step").exists());
}

#[test]
fn a_stranger_does_not_get_in() {
    let _limit = testkit::time_limit(60);
    for (variable, said) in [
        ("GPURUN_TOKEN=wrong", "wrong token"),
        ("WORLD_SIZE=2", "expects 2 ranks"),
        (
            "GPURUN_STORE=unix:@gpurun-nobody-is-here",
            "cannot reach the rendezvous store at unix:@gpurun-nobody-is-here",
        ),
    ] {
        let mut command = gpurun(&["--nproc", "1"]);
        command.args(["sh", "-c", &format!("{variable} $0 || echo refused $?")]).arg(barrier_job());
        let done = run(command);
        assert!(done.stdout.contains("[rank 0] refused 2"), "{variable}: {done:?}");
        assert!(done.stderr.contains(said), "{variable}: {done:?}");
    }
}

#[test]
fn descriptors_closed_in_between_do_not_matter() {
    let _limit = testkit::time_limit(30);
    let mut command = gpurun(&["--nproc", "2"]);
    let script = "eval \"exec $0 $GPURUN_SHM_FD<&- $GPURUN_POSITIONS_FD<&-\"";
    command.args(["bash", "-c", script]).arg(barrier_job());
    let done = run(command);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stdout.ends_with("finished 5 steps on 2 ranks, start 0\n"), "{done:?}");
}
