//! A job whose only collective is a barrier, through the rendezvous store or the shared memory: the smallest program that takes part in the
//! launcher's protocol. The launcher's tests run it; a user may read it to see what a program of his own has to do.
//!
//! `barrier_job [--steps N] [--step-millis M] [--tokens T] [--over store|memory] [--out DIR] [--fault RANK:STEP:WHAT]`, where WHAT is one of `panic`, `kill`,
//! `abort`, `stop`, `spin` (busy and getting nowhere), `exit:CODE` (without a word), `error:CODE` (with one), `leave`
//! (ends well, too early).

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpurun::worker::{Phase, StepReport, WorkFailure, Worker, WorkerError};
use gpurun_comm::{Communicator, Fabric, FabricOptions, HostCommunicator};
use gpurun_device::CpuBackend;
use gpurun_types::Rank;

/// Words for the instructions of a step.
const WORDS: [&str; 3] = ["forward h.0", "backward h.0", "all-reduce h.0"];
/// The instruction in which faults happen.
const FAULTY: u32 = 1;

struct Options {
    steps: u64,
    step_time: Duration,
    tokens: u64,
    over_memory: bool,
    out: Option<PathBuf>,
    fault: Option<(u32, u64, String)>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        steps: 5,
        step_time: Duration::from_millis(1),
        tokens: 0,
        over_memory: false,
        out: None,
        fault: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(name) = words.next() {
        let value = words.next().ok_or_else(|| format!("{name} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{name} {value}: not a number"));
        match name.as_str() {
            "--steps" => options.steps = number()?,
            "--step-millis" => options.step_time = Duration::from_millis(number()?),
            "--tokens" => options.tokens = number()?,
            "--over" => options.over_memory = value == "memory",
            "--out" => options.out = Some(value.into()),
            "--fault" => {
                let parts: Vec<&str> = value.splitn(3, ':').collect();
                let [rank, step, what] = parts[..] else { return Err(format!("--fault {value}: RANK:STEP:WHAT")) };
                let part = |text: &str| text.parse().map_err(|_| format!("--fault {value}: not a number"));
                options.fault = Some((part(rank)? as u32, part(step)?, what.to_owned()));
            }
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(options)
}

fn failure(message: String, exit_code: u8, secondary: bool) -> WorkFailure {
    WorkFailure { message, exit_code, secondary }
}

fn main() -> ExitCode {
    let worker = match Worker::from_env() {
        Ok(worker) => worker,
        Err(error) => {
            eprintln!("barrier_job: {error}");
            return ExitCode::from(2);
        }
    };
    ExitCode::from(worker.run(|worker| {
        let options = options().map_err(|problem| failure(problem, 2, false))?;
        work(worker, &options)
    }))
}

fn work(worker: &Worker, options: &Options) -> Result<String, WorkFailure> {
    let reporter = worker.reporter();
    reporter.words(&WORDS.map(String::from), &[]);
    for done in (0..=options.tokens).filter(|_| options.tokens > 0) {
        reporter.phase(0, Phase::Tokenising);
        reporter.task("tokenising", done, options.tokens);
        std::thread::sleep(options.step_time);
    }
    let link = options.over_memory.then(|| communicator(worker)).transpose()?;
    // After a restart it goes on behind the step in which it failed, as from a checkpoint, and the fault is gone.
    let first = match (&options.fault, worker.restart()) {
        (Some((_, step, _)), 1..) => *step,
        _ => 1,
    };
    for step in first..=options.steps {
        let begin = Instant::now();
        reporter.phase(step, Phase::Step);
        reporter.at(0);
        std::thread::sleep(options.step_time);
        reporter.at(FAULTY);
        if let Some((rank, at, what)) = &options.fault
            && (*rank, *at) == (worker.rank(), step)
            && worker.restart() == 0
        {
            strike(what)?;
            if what == "leave" {
                return Ok(String::new());
            }
        }
        reporter.waiting_in(2);
        match &link {
            Some(link) => link.barrier().map_err(|error| failure(error.to_string(), 4, error.is_secondary()))?,
            None => barrier(worker, &format!("step {step}"))?,
        }
        let seconds = begin.elapsed().as_secs_f64();
        reporter.step_done(&StepReport {
            step,
            total_steps: options.steps,
            loss: 5.0 / step as f64,
            grad_norm: 1.0,
            lr: 1e-3,
            tokens: step * 1000,
            tokens_per_second: 1000.0 / seconds,
            step_seconds: seconds,
            ..StepReport::default()
        });
        reporter.phase(step, Phase::Boundary);
        if agreed_to_stop(worker, step)? {
            save(worker, options, step)?;
            return Ok(format!("stopped after step {step}"));
        }
    }
    Ok(format!("finished {} steps on {} ranks, start {}", options.steps, worker.world(), worker.restart()))
}

/// All ranks, over the memory that they share.
fn communicator(worker: &Worker) -> Result<HostCommunicator, WorkFailure> {
    let own = |problem: String| failure(problem, 4, false);
    let memory = worker.shared_memory().ok_or_else(|| own("this rank shares no memory".to_owned()))?;
    let (rank, world) = (Rank(worker.rank()), worker.world());
    let fabric = Fabric::process(memory, rank, world, FabricOptions::default()).map_err(|e| own(e.to_string()))?;
    let backend = CpuBackend::new(1).map_err(|e| own(e.to_string()))?;
    let members: Vec<Rank> = (0..world).map(Rank).collect();
    fabric.communicator(0, &members, Arc::new(backend)).map_err(|e| own(e.to_string()))
}

/// Ranks may hear of a stop in different steps; rank 0's word counts.
fn agreed_to_stop(worker: &Worker, step: u64) -> Result<bool, WorkFailure> {
    let key = format!("stop {step}");
    if worker.rank() == 0 {
        worker.set(&key, &[u8::from(worker.reporter().stop_requested())]).map_err(lost)?;
    }
    let word = worker.get(&key, Duration::from_secs(60)).map_err(lost)?;
    Ok(word.map_or_else(|| worker.reporter().stop_requested(), |word| word == [1]))
}

fn save(worker: &Worker, options: &Options, step: u64) -> Result<(), WorkFailure> {
    worker.reporter().phase(step, Phase::Saving);
    if let Some(out) = &options.out
        && worker.rank() == 0
    {
        let file = out.join("step");
        std::fs::write(&file, step.to_string())
            .map_err(|error| failure(format!("cannot write {}: {error}", file.display()), 5, false))?;
        worker.reporter().saved(step, out);
    }
    Ok(())
}

fn barrier(worker: &Worker, name: &str) -> Result<(), WorkFailure> {
    worker.set(&format!("{name} rank {}", worker.rank()), &[]).map_err(lost)?;
    for rank in 0..worker.world() {
        worker.get(&format!("{name} rank {rank}"), Duration::from_secs(60)).map_err(lost)?;
    }
    Ok(())
}

/// What the store says when another rank failed.
fn lost(error: WorkerError) -> WorkFailure {
    failure(error.to_string(), 4, true)
}

fn strike(what: &str) -> Result<(), WorkFailure> {
    let signal = |name: &str| {
        let status = std::process::Command::new("kill").args(["-s", name, &std::process::id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -s {name} did not work");
    };
    match what.split_once(':').unwrap_or((what, "4")) {
        ("panic", _) => panic!("as the fault says"),
        ("kill", _) => signal("KILL"),
        ("abort", _) => std::process::abort(),
        ("stop", _) => signal("STOP"),
        ("spin", _) => loop {
            std::hint::spin_loop();
        },
        ("exit", code) => std::process::exit(code.parse().unwrap_or(4)),
        ("error", code) => return Err(failure("as the fault says".to_owned(), code.parse().unwrap_or(4), false)),
        ("leave", _) => {}
        (other, _) => return Err(failure(format!("unknown fault {other}"), 2, false)),
    }
    Ok(())
}
