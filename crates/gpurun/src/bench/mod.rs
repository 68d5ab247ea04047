//! `bench`: how fast training steps are on random tokens, where their time goes, and how far that is from what the machine
//! allows.

mod rates;
mod report;
mod steps;
mod table;

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use gpurun_engine::{EngineError, Session, model_spec};
use gpurun_model::BatchShape;
use gpurun_plan::{Drawing, MemoryItem, ModelSpec, Plan, Span, Timeline, trace};
use gpurun_types::{Bytes, Rank};
use serde::{Deserialize, Serialize};

use crate::devices::Devices;
use crate::host::reset_high_water;
use crate::options::{OptionsError, TrainArgs, TrainOptions};
use crate::plan::{title, write_beside};
use crate::run::{Told, builtin_model, in_worker, place};
use crate::train::{RankPlace, TrainError, TrainObserver, open_control, open_session, plan_options, ready};
use crate::worker::{WorkFailure, Worker};

use report::{Measured, Report};
use steps::{PROFILED, Steps, Timed};

/// Timed steps when their number is not given.
const TIMED: u64 = 20;

/// Options of `train` that change nothing here.
const UNUSED: [&str; 10] =
    ["data", "eval-data", "eval-every", "tokenizer", "epochs", "out", "save-every", "keep", "resume", "metrics"];

/// Time training steps on random tokens, and show where their time goes. Takes the options of `train`; --steps is the number
/// of timed steps [default: 20]. What a configuration file says of data, length and checkpoints is not used
#[derive(Parser)]
#[command(name = "bench", max_term_width = 110)]
struct BenchArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Steps before those that are timed
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Bench")]
    warm_up_steps: u64,
    /// One JSON object instead of tables
    #[arg(long, help_heading = "Bench")]
    json: bool,
    /// Write when the instructions of a step ran, for Perfetto (ui.perfetto.dev) or chrome://tracing
    #[arg(long, value_name = "FILE.json", help_heading = "Bench")]
    trace: Option<PathBuf>,
}

/// What is to be measured.
struct Bench {
    options: TrainOptions,
    warm_up: u64,
    timed: u64,
    json: bool,
    trace: Option<PathBuf>,
}

impl BenchArgs {
    fn resolve(self) -> Result<Bench, OptionsError> {
        let Self { mut train, warm_up_steps, json, trace } = self;
        let invalid = |name: &str, what: &str, mend: &str| OptionsError::Invalid {
            at: format!("--{name}"),
            what: what.to_owned(),
            mend: mend.to_owned(),
        };
        if let Some(name) = train.given().iter().find(|name| UNUSED.contains(&name.as_str())) {
            let what = "has no effect in bench, which trains on random tokens and keeps nothing";
            return Err(invalid(name, what, "leave it out"));
        }
        let timed = train.steps.unwrap_or(TIMED);
        if timed == 0 {
            return Err(invalid("steps", "0 is too few", "give at least 1, such as 20"));
        }
        // The learning rate is the bench's own: any course of it in a file is right.
        train.steps = Some(1 << 40);
        Ok(Bench { options: train.resolve()?, warm_up: warm_up_steps, timed, json, trace })
    }
}

/// `bench` with these arguments on one rank; the process's exit code.
pub fn bench_main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    in_worker(OsStr::new("bench"), arguments, |worker, args: BenchArgs| {
        let bench = args.resolve().map_err(|e| WorkFailure::from(TrainError::from(e)))?;
        work(worker, &bench)
    })
}

fn work(worker: &Worker, bench: &Bench) -> Result<String, WorkFailure> {
    let place = place(worker)?;
    let told = Told::new(worker);
    let Some((report, drawn)) = measure(bench, &place, &told)? else { return Ok(String::new()) };
    if let Some(file) = &bench.trace {
        let Drawn { title, plan, spec, timeline } = &drawn;
        write_beside(file, &trace(&Drawing { title, plan, spec, timeline, measured: true }))?;
    }
    Ok(if bench.json { serde_json::to_string(&report).expect("a report is plain data") } else { table::text(&report) })
}

/// What `--trace` shows.
struct Drawn {
    title: String,
    plan: Plan,
    spec: ModelSpec,
    timeline: Timeline,
}

/// A rank's memory: what its plan has, what its backend allocated, what its process took.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RankMemory {
    rank: u32,
    /// By the plan.
    device_planned_bytes: Bytes,
    /// In arenas: the plan's, and the batches on their way.
    device_allocated_bytes: Bytes,
    /// As the system counts it, context and libraries included; on the CPU all of the process.
    device_used_bytes: Option<Bytes>,
    host_planned_bytes: Bytes,
    host_allocated_bytes: Bytes,
    host_used_bytes: Option<Bytes>,
    items: Vec<MemoryItem>,
}

/// Rank 0's report; nothing on other ranks, or when the run was stopped.
fn measure(bench: &Bench, place: &RankPlace<'_>, told: &Told) -> Result<Option<(Report, Drawn)>, TrainError> {
    let model = builtin_model(&bench.options).map_err(TrainError::from)?;
    bench.options.check_context(model.max_seq)?;
    let notes = RefCell::new(Vec::new());
    let note = |line: &str| {
        notes.borrow_mut().push(line.to_owned());
        if place.rank == Rank(0) && !bench.json {
            told.note(line);
        }
    };
    let (devices, options) = ready(&bench.options, &model, place, &note)?;
    let machine = rates::measured(&devices, &options, place)?;
    // What the measurement took is given back, and is none of the run's.
    reset_high_water();
    let control = open_control(place)?;
    let model = Arc::new(model);
    let session = open_session(&options, model.clone(), place, &devices)?;
    session.initialise(options.seed)?;
    let (train, evaluate) = session.labels();
    told.started(bench.warm_up + bench.timed + PROFILED as u64, train, evaluate);
    let micro = options.micro_batches(place.world)?;
    let steps = Steps {
        session: &session,
        control: &control,
        told,
        show: !bench.json,
        warm_up: bench.warm_up,
        timed: bench.timed,
        micro_batches: micro.count,
        seed: options.seed,
    };
    let Some(timed) = steps.run()? else { return Ok(None) };
    let Some(ranks) = gathered(place, &timed, &memory(&session, &devices))? else { return Ok(None) };
    let shape = BatchShape { batch: micro.sequences, seq: options.seq_len };
    let spec = model_spec(&model, shape, options.dtype, devices.backend.as_ref())?;
    let plan = Plan::build(&spec, &plan_options(&options, place.world)?).map_err(EngineError::from)?;
    let title = title(&options, &micro, place.world);
    let measured = Measured {
        bench,
        options: &options,
        micro,
        device: devices.backend.name(),
        peak: devices.peak(options.dtype),
        model: &model,
        spec: &spec,
        plan: &plan,
        machine,
        seconds: timed.seconds,
        ranks,
        notes: notes.into_inner(),
    };
    let (report, timeline) = measured.report(&title);
    Ok(Some((report, Drawn { title, plan, spec, timeline })))
}

fn memory(session: &Session, devices: &Devices<'_>) -> RankMemory {
    let (planned, allocated) = (session.planned_bytes(), session.allocated_bytes());
    let used = devices.memory_in_use()();
    RankMemory {
        rank: session.rank().0,
        device_planned_bytes: planned.0,
        device_allocated_bytes: allocated.0,
        device_used_bytes: used.device,
        host_planned_bytes: planned.1,
        host_allocated_bytes: allocated.1,
        host_used_bytes: used.host,
        items: session.memory(),
    }
}

/// What a rank tells rank 0.
struct FromRank {
    memory: RankMemory,
    /// By step that was looked into.
    spans: Vec<Vec<Span>>,
}

/// What all ranks measured, on rank 0.
fn gathered(place: &RankPlace<'_>, timed: &Timed, memory: &RankMemory) -> Result<Option<Vec<FromRank>>, TrainError> {
    let mine = serde_json::to_vec(memory).expect("memory is plain data");
    let memories = place.tell_first("bench-memory", mine)?;
    let mut spans = Vec::new();
    for (index, mine) in timed.spans.iter().enumerate() {
        let bytes = mine.iter().flat_map(|span| [span.start.to_le_bytes(), span.end.to_le_bytes()].concat()).collect();
        spans.push(place.tell_first(&format!("bench-spans-{index}"), bytes)?);
    }
    let Some(memories) = memories else { return Ok(None) };
    let mut ranks = Vec::new();
    for (rank, memory) in memories.iter().enumerate() {
        let memory = serde_json::from_slice(memory).map_err(|e| TrainError::Board(e.to_string()))?;
        let of_rank = spans.iter().flatten().map(|ranks| decode(&ranks[rank])).collect();
        ranks.push(FromRank { memory, spans: of_rank });
    }
    Ok(Some(ranks))
}

fn decode(bytes: &[u8]) -> Vec<Span> {
    let (pairs, _) = bytes.as_chunks::<16>();
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    pairs.iter().map(|pair| Span { start: number(&pair[..8]), end: number(&pair[8..]) }).collect()
}

#[cfg(test)]
mod tests {
    // A failed unwrap is a failed test.
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn options_that_change_nothing_are_refused() {
        let _limit = testkit::time_limit(10);
        let resolve = |line: &str| BenchArgs::try_parse_from(line.split(' ')).unwrap().resolve();
        for flag in ["--out somewhere", "--epochs 2", "--data here there", "--resume auto", "--steps 0"] {
            let error = resolve(&format!("bench {flag}")).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(flag.split(' ').next().unwrap()) && error.contains("; "), "{error}");
        }
        let names: Vec<String> = TrainArgs::default().given();
        assert!(names.is_empty());
        let bench = resolve("bench --steps 7 --warmup 1000 --zero 2").unwrap();
        assert_eq!((bench.timed, bench.warm_up, bench.options.zero), (7, 3, 2));
        assert_eq!(resolve("bench").unwrap().timed, TIMED);
    }

    #[test]
    fn spans_go_to_rank_0_unchanged() {
        let _limit = testkit::time_limit(10);
        let spans = [Span { start: 1.0 / 3.0, end: 2.0 }, Span { start: 0.0, end: 1e-9 }];
        let bytes: Vec<u8> =
            spans.iter().flat_map(|span| [span.start.to_le_bytes(), span.end.to_le_bytes()].concat()).collect();
        assert_eq!(decode(&bytes), spans);
    }
}
