//! `plan`: what each rank of a run would hold and send, without running it.

use std::path::{Path, PathBuf};

use clap::Parser;
use clap::builder::PossibleValuesParser;
use gpurun_device::{CpuSizes, CudaSizes, ScratchSizes};
use gpurun_engine::{EngineError, model_spec};
use gpurun_model::BatchShape;
use gpurun_plan::{
    CollectiveVolume, Drawing, Machine, MemoryItem, ModelSpec, OffloadVia, Plan, Recompute, Timeline, checkpoint_bytes,
    collective_volume, estimate, memory_report, svg, trace,
};
use gpurun_types::{Bytes, Lane, Place};
use serde::Serialize;

use crate::command::{Failure, command, print};
use crate::fit::{Fitted, Planner, fitted, machine};
use crate::options::{Device, MicroBatches, Offload, PipelineSchedule, TrainArgs, TrainOptions, spelled};
use crate::search::{Best, search};
use crate::train::{TrainError, plan_options};

/// Show what each rank of `train` with these options would hold in memory and send, without running it
#[derive(Parser)]
#[command(name = "plan", max_term_width = 110)]
struct PlanArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// The instructions of rank 0 instead of tables
    #[arg(long, conflicts_with = "json")]
    listing: bool,
    /// Machine for which times are estimated: cpu, h200, a100 or l40s [default: h200 with --device cuda, or cpu]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(gpurun_plan::Machine::NAMES))]
    machine: Option<String>,
    /// List the settings of --pp, --zero, --recompute, --micro-batch and --offload that give the shortest estimated step within
    /// --gpu-memory-limit; those that are given stay as they are
    #[arg(long, conflicts_with_all = ["listing", "draw", "trace"])]
    search: bool,
    /// Draw memory over the step, and the lanes as a Gantt chart
    #[arg(long, value_name = "FILE.svg")]
    draw: Option<PathBuf>,
    /// Write the step for Perfetto (ui.perfetto.dev) or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    parameters: usize,
    micro_batches: u32,
    sequences: usize,
    estimate: Estimate,
    /// What was chosen where the options left it open, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    chosen: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline: Option<Pipeline>,
    ranks: Vec<RankReport>,
}

/// How layers are placed over the stages of a pipeline.
#[derive(Debug, Serialize)]
struct Pipeline {
    schedule: PipelineSchedule,
    /// Idle share of a step when all stages take equally long and messages no time.
    ideal_bubble: f64,
    /// Units of each chunk in the order of the chain: what --pp-split takes.
    split: Vec<u32>,
    stages: Vec<StageReport>,
}

#[derive(Debug, Serialize)]
struct StageReport {
    /// Names of the first and the last unit of each chunk.
    units: Vec<[String; 2]>,
    /// Estimated share of the step in which the compute lane has nothing to do.
    idle: f64,
}

/// How long a step would take.
#[derive(Debug, Serialize)]
struct Estimate {
    machine: String,
    step_seconds: f64,
    tokens_per_second: f64,
}

#[derive(Debug, Serialize)]
struct RankReport {
    rank: u32,
    device_peak_bytes: Bytes,
    host_peak_bytes: Bytes,
    checkpoint_bytes: Bytes,
    collectives: CollectiveVolume,
    items: Vec<MemoryItem>,
}

impl RankReport {
    /// The same bytes under the same names, and as much to send.
    fn holds_as(&self, other: &Self) -> bool {
        self.items == other.items
            && self.collectives == other.collectives
            && self.checkpoint_bytes == other.checkpoint_bytes
    }
}

/// `plan` with these arguments for `nproc` ranks; the process's exit code.
pub fn plan_main(arguments: impl IntoIterator<Item = std::ffi::OsString>, nproc: u32) -> u8 {
    command::<PlanArgs>("plan", arguments, |args| {
        print(&show(args, nproc)?);
        Ok(())
    })
}

fn show(args: PlanArgs, nproc: u32) -> Result<String, Failure> {
    let options = args.train.resolve()?;
    if args.search {
        return searched(&options, nproc, args.machine.as_deref(), args.json);
    }
    let machine = machine(args.machine.as_deref(), &options, nproc);
    let planned = Planned::build(&options, nproc, &machine)?;
    let timeline = estimate(&planned.plan, &planned.spec, &machine);
    let title = title(&planned.options, &planned.micro, nproc);
    let drawing =
        Drawing { title: &title, plan: &planned.plan, spec: &planned.spec, timeline: &timeline, measured: false };
    if let Some(file) = &args.draw {
        write_beside(file, &svg(&drawing))?;
    }
    if let Some(file) = &args.trace {
        write_beside(file, &trace(&drawing))?;
    }
    if args.listing {
        return Ok(planned.plan.ranks[0].train_listing().to_string());
    }
    let report = planned.report(&timeline);
    if args.json {
        let text = serde_json::to_string(&report).expect("a report is plain data");
        return Ok(text + "\n");
    }
    Ok(tables(&report))
}

/// Lines that `--search` shows.
const BEST: usize = 10;

fn searched(options: &TrainOptions, nproc: u32, name: Option<&str>, json: bool) -> Result<String, Failure> {
    let model = options.model.config.build().map_err(TrainError::from)?;
    options.check_context(model.max_seq)?;
    let machine = machine(name, options, nproc);
    let planner = Planner { model: &model, world: nproc, sizes: sizes(options) };
    let Best { found: best, settings, planned } = search(&planner, options, &machine, BEST)?;
    if best.is_empty() {
        // Says why, and what comes nearest.
        fitted(&planner, options, &|_| Ok(table(&machine)))?;
        return Err(Failure::new(
            3,
            "nothing fits --gpu-memory-limit; use more ranks, a smaller model or a shorter --seq-len",
        ));
    }
    if json {
        let text = serde_json::to_string(&best).expect("a report is plain data");
        return Ok(text + "\n");
    }
    let mut text = format!(
        "the best of {settings} settings that could fit, {planned} of which had to be planned; estimated on {}\n",
        machine.describe()
    );
    text.push_str("    s a step   tokens/s       device         host  settings\n");
    for plan in best {
        text.push_str(&format!(
            "{:>12.4} {:>10.0} {:>12} {:>12}  {}\n",
            plan.step_seconds,
            plan.tokens_per_second,
            plan.device_peak_bytes.to_string(),
            plan.host_peak_bytes.to_string(),
            plan.flags
        ));
    }
    Ok(text)
}

/// The machine's rates, and where they are from.
fn table(machine: &Machine) -> (Machine, String) {
    let words = format!("by the rates of {}; `train` measures its own", machine.name);
    (machine.clone(), words)
}

fn sizes(options: &TrainOptions) -> &'static dyn ScratchSizes {
    if options.device == Device::Cuda { &CudaSizes } else { &CpuSizes }
}

/// What a picture is of.
pub(crate) fn title(options: &TrainOptions, micro: &MicroBatches, world: u32) -> String {
    let ranks = if world == 1 { "1 rank".to_owned() } else { format!("{world} ranks") };
    let recompute = match options.recompute {
        Recompute::None => "",
        Recompute::Selective => ", selective recompute",
        Recompute::Full => ", full recompute",
    };
    let offload = match (options.offload, options.offload_via) {
        (Offload::None, _) => "",
        (Offload::Optimizer, Some(OffloadVia::Stream)) => ", Adam state streamed from the host",
        (Offload::Optimizer, _) => ", Adam on the host",
    };
    let pipeline = match options.pp {
        1 => String::new(),
        pp => format!(", {pp} stages ({})", spelled(options.pp_schedule)),
    };
    format!(
        "{}, {}, {ranks}{pipeline}, ZeRO {}{recompute}{offload}, {} micro-batches of {} x {} tokens",
        options.model.describe(),
        options.dtype,
        options.zero,
        micro.count,
        micro.sequences,
        options.seq_len
    )
}

/// Writes a file whole or not at all.
pub(crate) fn write_beside(file: &Path, text: &str) -> Result<(), Failure> {
    let name = file.file_name().map(|n| n.to_string_lossy().into_owned());
    let Some(name) = name else {
        return Err(Failure::new(2, format!("{} names no file; give FILE.svg or FILE.json", file.display())));
    };
    let beside = file.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, file));
    written.map_err(|error| {
        // What could not be renamed is of no use; the first error is the one to tell.
        let _ = std::fs::remove_file(&beside);
        Failure::new(2, format!("cannot write {}: {error}; check the folder and its permissions", file.display()))
    })
}

/// A plan and what it was made from.
struct Planned {
    options: TrainOptions,
    micro: MicroBatches,
    /// What was chosen where the options left it open.
    notes: Vec<String>,
    spec: ModelSpec,
    plan: Plan,
}

impl Planned {
    fn build(options: &TrainOptions, nproc: u32, machine: &Machine) -> Result<Self, Failure> {
        let model = options.model.config.build().map_err(TrainError::from)?;
        options.check_context(model.max_seq)?;
        let sizes = sizes(options);
        let planner = Planner { model: &model, world: nproc, sizes };
        let Fitted { options, micro, notes } = fitted(&planner, options, &|_| Ok(table(machine)))?;
        let shape = BatchShape { batch: micro.sequences, seq: options.seq_len };
        let spec = model_spec(&model, shape, options.dtype, sizes)?;
        let plan = Plan::build(&spec, &plan_options(&options, nproc)?).map_err(EngineError::from)?;
        Ok(Self { options, micro, notes, spec, plan })
    }

    fn report(&self, timeline: &Timeline) -> Report {
        let mesh = self.plan.options.mesh;
        let ranks = self.plan.ranks.iter().map(|rank| RankReport {
            rank: rank.rank.0,
            device_peak_bytes: rank.device_bytes,
            host_peak_bytes: rank.host_bytes,
            checkpoint_bytes: checkpoint_bytes(rank, mesh.dp),
            collectives: collective_volume(rank),
            items: memory_report(rank),
        });
        let tokens = (self.options.global_batch * self.options.seq_len) as f64;
        Report {
            parameters: self.spec.units.iter().map(gpurun_plan::UnitSpec::elements).sum(),
            micro_batches: self.micro.count,
            sequences: self.micro.sequences,
            estimate: Estimate {
                machine: timeline.machine.name.clone(),
                step_seconds: timeline.seconds,
                tokens_per_second: tokens / timeline.seconds,
            },
            chosen: self.notes.clone(),
            pipeline: (mesh.pp > 1).then(|| self.pipeline(timeline)),
            ranks: ranks.collect(),
        }
    }

    fn pipeline(&self, timeline: &Timeline) -> Pipeline {
        let gpurun_plan::PlanOptions { mesh, schedule, micro_batches, .. } = self.plan.options;
        let name = |unit: u32| self.spec.units[unit as usize].name.clone();
        let firsts = self.plan.ranks.iter().step_by(mesh.dp as usize);
        let mut chunks: Vec<_> = firsts.flat_map(|rank| rank.chunks.iter().cloned()).collect();
        chunks.sort_unstable_by_key(|units| units.start);
        let stage = |stage: u32| {
            let rank = (stage * mesh.dp) as usize;
            let chunks = self.plan.ranks[rank].chunks.iter();
            StageReport {
                units: chunks.map(|units| [units.start, units.end - 1].map(name)).collect(),
                idle: 1.0 - timeline.busy(&self.plan, rank, Lane::Compute) / timeline.seconds,
            }
        };
        Pipeline {
            schedule: self.options.pp_schedule,
            ideal_bubble: schedule.bubble(mesh.pp, micro_batches),
            split: chunks.iter().map(|units| units.end - units.start).collect(),
            stages: (0..mesh.pp).map(stage).collect(),
        }
    }
}

/// Tables for people; ranks that hold the same share one.
fn tables(report: &Report) -> String {
    let mut text = format!(
        "{:.1} M parameters; a step is {} micro-batches of {} sequences on each rank\n\
         estimated on {}: {:.4} s a step, {:.0} tokens/s\n",
        report.parameters as f64 / 1e6,
        report.micro_batches,
        report.sequences,
        report.estimate.machine,
        report.estimate.step_seconds,
        report.estimate.tokens_per_second
    );
    for line in &report.chosen {
        text.push_str(line);
        text.push('\n');
    }
    if let Some(pipeline) = &report.pipeline {
        text.push_str(&stages(pipeline));
    }
    let mut start = 0;
    while start < report.ranks.len() {
        let first = &report.ranks[start];
        let count = report.ranks[start..].iter().take_while(|r| r.holds_as(first)).count();
        let who = if count == 1 { format!("rank {start}") } else { format!("ranks {start} to {}", start + count - 1) };
        text.push_str(&holding(&who, first));
        start += count;
    }
    text
}

fn stages(pipeline: &Pipeline) -> String {
    let split: Vec<String> = pipeline.split.iter().map(u32::to_string).collect();
    let mut text = format!(
        "{} stages in the order of {}; idle {:.1} % of a step if all took equally long; --pp-split {}\n",
        pipeline.stages.len(),
        spelled(pipeline.schedule),
        100.0 * pipeline.ideal_bubble,
        split.join(",")
    );
    for (index, stage) in pipeline.stages.iter().enumerate() {
        let chunk = |[first, last]: &[String; 2]| match first == last {
            true => first.clone(),
            false => format!("{first} to {last}"),
        };
        let units: Vec<String> = stage.units.iter().map(chunk).collect();
        text.push_str(&format!(
            "  stage {index}: {}, estimated idle {:.1} %\n",
            units.join(" and "),
            100.0 * stage.idle
        ));
    }
    text
}

fn holding(who: &str, rank: &RankReport) -> String {
    let mut text = format!("\n{who}\n");
    for (place, total) in [(Place::Device, rank.device_peak_bytes), (Place::Host, rank.host_peak_bytes)] {
        if total.0 == 0 {
            continue;
        }
        for item in rank.items.iter().filter(|i| i.place == place) {
            text.push_str(&format!("  {:<22} {:>12}  {place}\n", item.name, item.bytes.to_string()));
        }
        text.push_str(&format!("  {:<22} {:>12}  {place}\n", "total", total.to_string()));
    }
    let sent = rank.collectives;
    text.push_str(&format!("  checkpoint part        {:>12}\n", rank.checkpoint_bytes.to_string()));
    if sent.count > 0 {
        text.push_str(&format!(
            "  a step sends {:.1} M elements in {} collectives\n",
            sent.elements as f64 / 1e6,
            sent.count
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    // A failed unwrap is a failed test.
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn planned(line: &str) -> (PlanArgs, Planned) {
        let args = PlanArgs::try_parse_from(std::iter::once("plan").chain(line.split(' '))).unwrap();
        let options = args.train.clone().resolve().unwrap();
        let machine = machine(args.machine.as_deref(), &options, 1);
        let planned = Planned::build(&options, 1, &machine).unwrap();
        (args, planned)
    }

    /// The steps of docs/performance.md, on one H200: within a fifth.
    #[test]
    fn estimates_are_near_measured_steps() {
        let _limit = testkit::time_limit(20);
        for (model, batch, seq, measured) in
            [("gpt2-124m", 32, 1024, 487_800.0), ("llama-1b", 8, 2048, 79_200.0), ("gpt2-1558m", 8, 1024, 42_900.0)]
        {
            let (args, planned) = planned(&format!(
                "--model {model} --device cuda --dtype bf16 --global-batch {batch} --micro-batch {batch} --seq-len {seq}"
            ));
            let machine = machine(args.machine.as_deref(), &planned.options, 1);
            let seconds = estimate(&planned.plan, &planned.spec, &machine).seconds;
            let estimated = (batch * seq) as f64 / seconds;
            let ratio = estimated / measured;
            assert!((0.8..1.2).contains(&ratio), "{model}: {estimated:.0} tokens/s, measured {measured}");
        }
    }

    #[test]
    fn a_search_lists_what_fits_fastest_first_and_keeps_what_is_given() {
        let _limit = testkit::time_limit(30);
        let run = |line: &str, ranks| show(PlanArgs::try_parse_from(line.split(' ')).unwrap(), ranks);
        let list = |line: &str| -> Vec<serde_json::Value> { serde_json::from_str(&run(line, 2).unwrap()).unwrap() };
        let all = list("plan --search --json --recompute full");
        assert_eq!(all.len(), BEST);
        let number = |plan: &serde_json::Value, what: &str| plan[what].as_f64().unwrap();
        assert!(all.windows(2).all(|w| number(&w[0], "step_seconds") <= number(&w[1], "step_seconds")));
        assert!(all.iter().all(|p| p["flags"].as_str().unwrap().contains("--recompute full")));
        // Under the least that any of them needs, all are smaller; what is listed is what a plan with its flags says.
        let least = all.iter().map(|p| number(p, "device_peak_bytes") as u64).min().unwrap() - 1;
        let limited = list(&format!("plan --search --json --recompute full --gpu-memory-limit {least}"));
        assert!(!limited.is_empty() && limited.iter().all(|p| number(p, "device_peak_bytes") <= least as f64));
        let flags = limited[0]["flags"].as_str().unwrap();
        let planned: serde_json::Value =
            serde_json::from_str(&run(&format!("plan --json {flags}"), 2).unwrap()).unwrap();
        assert_eq!(planned["ranks"][0]["device_peak_bytes"], limited[0]["device_peak_bytes"]);
        assert_eq!(planned["ranks"][0]["host_peak_bytes"], limited[0]["host_peak_bytes"]);
        assert_eq!(planned["estimate"]["step_seconds"], limited[0]["step_seconds"]);
        let nothing = run("plan --search --gpu-memory-limit 1KiB", 2).unwrap_err();
        assert!(format!("{nothing:?}").contains("does not fit"), "{nothing:?}");
    }

    #[test]
    fn what_would_fit_is_the_fastest_of_the_smallest_changes() {
        let _limit = testkit::time_limit(30);
        let run = |line: &str| show(PlanArgs::try_parse_from(line.split(' ')).unwrap(), 2);
        let base = "plan --model gpt2-124m --seq-len 256 --global-batch 8";
        let needs = |more: &str| -> u64 {
            let micro = if more.contains("micro") { "" } else { " --micro-batch 4" };
            // Under a limit the host steps Adam if streaming does not fit; here there is none.
            let more = more.replace("--offload optimizer", "--offload optimizer --offload-via host");
            let text = run(&format!("{base}{micro} --json{more}")).unwrap();
            let json: serde_json::Value = serde_json::from_str(&text).unwrap();
            json["ranks"][0]["device_peak_bytes"].as_u64().unwrap()
        };
        // A little less than everything: several single changes would do; selective recompute costs the least time of them.
        let refused =
            format!("{:?}", run(&format!("{base} --micro-batch 4 --gpu-memory-limit {}", needs("") - 1)).unwrap_err());
        assert!(refused.contains("exit_code: 3") && refused.contains("largest: "), "{refused}");
        let proposed = refused.split("it would fit with ").nth(1).unwrap().split(':').next().unwrap();
        assert!(needs(&format!(" {proposed}")) < needs(""), "{proposed}");
        assert_eq!(proposed.matches("--").count(), 1, "one change is enough: {proposed}");
        // Less than any single change gives: two.
        let singles =
            ["--zero 1", "--zero 2", "--zero 3", "--recompute full", "--offload optimizer", "--micro-batch 1"];
        let least = singles.iter().map(|s| needs(&format!(" {s}"))).min().unwrap();
        let refused =
            format!("{:?}", run(&format!("{base} --micro-batch 4 --gpu-memory-limit {}", least - 1)).unwrap_err());
        let proposed = refused.split("it would fit with ").nth(1).unwrap().split(':').next().unwrap();
        assert_eq!(proposed.matches("--").count(), 2, "{proposed}");
        assert!(needs(&format!(" {proposed}")) < least, "{proposed}");
    }

    fn json(line: &str, ranks: u32) -> serde_json::Value {
        let text = show(PlanArgs::try_parse_from(format!("plan --json {line}").split(' ')).unwrap(), ranks).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn who_steps_adam_is_the_one_of_the_shorter_estimated_step() {
        let _limit = testkit::time_limit(20);
        let base = "--model gpt2-124m --global-batch 16 --micro-batch 8 --dtype bf16 --device cuda";
        let mut won = std::collections::BTreeSet::new();
        // A card with fast memory behind its link, and one processor that is both.
        for machine in ["h200", "cpu"] {
            let seconds = |more: &str| {
                let line = format!("{base} --offload optimizer --machine {machine}{more}");
                json(&line, 2)["estimate"]["step_seconds"].as_f64().unwrap()
            };
            let vias = ["host", "stream"].map(|via| (seconds(&format!(" --offload-via {via}")), via));
            let best = vias.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
            for auto in ["", " --offload-via auto"] {
                assert_eq!(seconds(auto), best.0);
            }
            let chosen = json(&format!("{base} --offload optimizer --machine {machine}"), 2)["chosen"][0].clone();
            let chosen = chosen.as_str().unwrap();
            let start = format!("--offload-via {}: a step is estimated at {:.4} s, with ", best.1, best.0);
            assert!(chosen.starts_with(&start) && chosen.contains(&format!("by the rates of {machine}")), "{chosen}");
            won.insert(best.1);
        }
        assert!(json(base, 2)["chosen"].is_null(), "nothing was left open");
        assert!(!won.is_empty());
    }

    #[test]
    fn the_share_on_the_host_is_the_least_that_fits() {
        let _limit = testkit::time_limit(20);
        let base = "--model gpt2-124m --global-batch 2 --micro-batch 1 --offload optimizer --offload-via";
        let device = |line: &str| json(line, 1)["ranks"][0]["device_peak_bytes"].as_u64().unwrap();
        for via in ["host", "stream"] {
            let at = |fraction: f64| device(&format!("{base} {via} --offload-fraction {fraction}"));
            let auto =
                |limit: u64| json(&format!("{base} {via} --offload-fraction auto --gpu-memory-limit {limit}"), 1);
            let [all, none] = [at(1.0), at(0.0)];
            assert!(all < none);
            let limit = all + (none - all) / 2;
            let found = auto(limit);
            let used = found["ranks"][0]["device_peak_bytes"].as_u64().unwrap();
            let line = found["chosen"][0].as_str().unwrap();
            let fraction: f64 = line.strip_prefix("--offload-fraction ").unwrap()[..5].parse().unwrap();
            assert!(used <= limit && at(fraction) == used, "{line}: {used}");
            // 12 blocks, the embedding and the end: with one unit less on the host it would not fit.
            assert!(at(fraction - 1.0 / 14.0) > limit, "{line}");
            // Room for all: nothing goes to the host. Room for none: refused.
            assert_eq!(auto(none)["ranks"][0]["host_peak_bytes"], 0);
            let line = format!("plan {base} {via} --offload-fraction auto --gpu-memory-limit {}", all - 1);
            let refused = show(PlanArgs::try_parse_from(line.split(' ')).unwrap(), 1).unwrap_err();
            assert!(format!("{refused:?}").contains("exit_code: 3"), "{refused:?}");
        }
    }

    #[test]
    fn pictures_are_written_whole() {
        let _limit = testkit::time_limit(20);
        let dir = tempfile::tempdir().unwrap();
        let (svg, json) = (dir.path().join("p.svg"), dir.path().join("p.json"));
        let line = format!("plan --machine a100 --draw {} --trace {}", svg.display(), json.display());
        let text = show(PlanArgs::try_parse_from(line.split(' ')).unwrap(), 2).unwrap();
        assert!(text.contains("estimated on a100"), "{text}");
        assert!(std::fs::read_to_string(&svg).unwrap().ends_with("</svg>\n"));
        let trace: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        assert!(trace["otherData"]["times"].as_str().unwrap().contains("a100"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left beside them");
        let nowhere = format!("plan --draw {}/none/p.svg", dir.path().display());
        let error = show(PlanArgs::try_parse_from(nowhere.split(' ')).unwrap(), 1).unwrap_err();
        assert!(format!("{error:?}").contains("cannot write"), "{error:?}");
    }
}
