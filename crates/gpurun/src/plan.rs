//! `plan`: what each rank of a run would hold and send, without running it.

use clap::Parser;
use gpurun_device::{CpuSizes, CudaSizes, ScratchSizes};
use gpurun_engine::{EngineError, model_spec};
use gpurun_model::BatchShape;
use gpurun_plan::{CollectiveVolume, MemoryItem, Plan, checkpoint_bytes, collective_volume, memory_report};
use gpurun_types::{Bytes, Place};
use serde::Serialize;

use crate::command::{Failure, command};
use crate::fit::fitted;
use crate::options::{Device, TrainArgs, TrainOptions};
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
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    parameters: usize,
    micro_batches: u32,
    sequences: usize,
    ranks: Vec<RankReport>,
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
        let text = show(args, nproc)?;
        // A reader that closed the pipe has read enough.
        let _closed = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
        Ok(())
    })
}

fn show(args: PlanArgs, nproc: u32) -> Result<String, Failure> {
    let (json, listing) = (args.json, args.listing);
    let options = args.train.resolve()?;
    let (plan, report) = build(&options, nproc)?;
    if listing {
        return Ok(plan.ranks[0].train_listing().to_string());
    }
    if json {
        let text = serde_json::to_string(&report).expect("a report is plain data");
        return Ok(text + "\n");
    }
    Ok(tables(&report))
}

fn build(options: &TrainOptions, nproc: u32) -> Result<(Plan, Report), Failure> {
    let model = options.model.config.build().map_err(TrainError::from)?;
    options.check_context(model.max_seq)?;
    let sizes: &dyn ScratchSizes = if options.device == Device::Cuda { &CudaSizes } else { &CpuSizes };
    let (options, micro) = &fitted(options, &model, nproc, sizes)?;
    let shape = BatchShape { batch: micro.sequences, seq: options.seq_len };
    let spec = model_spec(&model, shape, options.dtype, sizes)?;
    let plan = Plan::build(&spec, &plan_options(options, nproc)?).map_err(EngineError::from)?;
    let ranks = plan.ranks.iter().map(|rank| RankReport {
        rank: rank.rank.0,
        device_peak_bytes: rank.device_bytes,
        host_peak_bytes: rank.host_bytes,
        checkpoint_bytes: checkpoint_bytes(rank, nproc),
        collectives: collective_volume(rank),
        items: memory_report(rank),
    });
    let report = Report {
        parameters: spec.units.iter().map(gpurun_plan::UnitSpec::elements).sum(),
        micro_batches: micro.count,
        sequences: micro.sequences,
        ranks: ranks.collect(),
    };
    Ok((plan, report))
}

/// Tables for people; ranks that hold the same share one.
fn tables(report: &Report) -> String {
    let mut text = format!(
        "{:.1} M parameters; a step is {} micro-batches of {} sequences on each rank\n",
        report.parameters as f64 / 1e6,
        report.micro_batches,
        report.sequences
    );
    let mut start = 0;
    while start < report.ranks.len() {
        let first = &report.ranks[start];
        let count = report.ranks[start..].iter().take_while(|r| r.holds_as(first)).count();
        let who = if count == 1 { format!("rank {start}") } else { format!("ranks {start} to {}", start + count - 1) };
        text.push_str(&table(&who, first));
        start += count;
    }
    text
}

fn table(who: &str, rank: &RankReport) -> String {
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
