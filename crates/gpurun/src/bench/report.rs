//! What was measured beside what the machine allows, as plain data: what `--json` prints.

use std::collections::BTreeMap;

use gpurun_device::Peak;
use gpurun_model::Model;
use gpurun_plan::{Communication, Machine, ModelSpec, Plan, Span, Timeline, UnitSpec, estimate, estimate_with};
use gpurun_types::{DType, Lane};
use serde::Serialize;

use super::{Bench, FromRank, RankMemory};
use crate::options::{MicroBatches, PipelineSchedule, TrainOptions};

/// All that rank 0 knows after the steps.
pub(super) struct Measured<'a> {
    pub bench: &'a Bench,
    pub options: &'a TrainOptions,
    pub micro: MicroBatches,
    pub device: String,
    pub peak: Option<Peak>,
    pub model: &'a Model,
    pub spec: &'a ModelSpec,
    pub plan: &'a Plan,
    pub machine: Machine,
    pub seconds: Vec<f64>,
    pub ranks: Vec<FromRank>,
    pub notes: Vec<String>,
}

/// What `--json` prints. Times are in seconds, of one step where nothing else is said.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub title: String,
    pub device: String,
    pub ranks: usize,
    pub parameters: usize,
    pub dtype: DType,
    pub tokens_per_step: usize,
    pub micro_batches: u32,
    pub sequences: usize,
    pub seq_len: usize,
    pub warm_up_steps: u64,
    pub timed_steps: u64,
    pub step_seconds: StepSeconds,
    pub tokens_per_second: f64,
    pub flops_per_token: f64,
    /// Model FLOPs over the devices' peak.
    pub mfu: f64,
    pub peak: PeakOfDevice,
    /// A step at these rates, with nothing in the way but what has to be waited for.
    pub limit_seconds: f64,
    /// The limit over the median step.
    pub fraction_of_limit: f64,
    pub rates: Machine,
    pub memory: Vec<RankMemory>,
    /// Length of the step that was looked into, the median of a few; what follows is of it.
    pub profiled_step_seconds: f64,
    pub instructions: Vec<Kind>,
    pub communication: Vec<RankCommunication>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<Pipeline>,
    /// What was chosen where the options left it open.
    pub notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct StepSeconds {
    pub median: f64,
    pub p10: f64,
    pub p90: f64,
    pub all: Vec<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct PeakOfDevice {
    /// FLOP/s of one device.
    pub flops: f64,
    pub source: String,
}

/// Instructions that do the same, of a rank that has them on average.
#[derive(Debug, Serialize)]
pub(super) struct Kind {
    pub what: String,
    pub lane: Lane,
    /// Ranks that have such instructions.
    pub ranks: usize,
    pub count: f64,
    pub seconds: f64,
    /// Operations over their rate and bytes over their bandwidth. A collective waits for the last rank; its floor does not.
    pub floor_seconds: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct RankCommunication {
    pub rank: usize,
    pub measured: Communication,
    /// The same of the step at the limit.
    pub floor: Communication,
}

#[derive(Debug, Serialize)]
pub(super) struct Pipeline {
    pub schedule: PipelineSchedule,
    /// Idle share if all stages took equally long and messages no time.
    pub formula: f64,
    pub stages: Vec<Stage>,
}

/// Shares of the step in which the compute lane of a stage's first rank is idle.
#[derive(Debug, Serialize)]
pub(super) struct Stage {
    pub stage: u32,
    pub measured: f64,
    /// If each instruction of the compute lane takes as long as it was measured to, and the rest its floor.
    pub predicted: f64,
    /// At the limit.
    pub at_limit: f64,
}

impl Measured<'_> {
    /// The report, and when instructions ran in the step that it tells of.
    pub fn report(self, title: &str) -> (Report, Timeline) {
        let limit = estimate(self.plan, self.spec, &self.machine);
        let timeline = self.timeline();
        let instructions = kinds(self.plan, self.spec, &timeline, &limit);
        let communication = self.communication(&timeline, &limit);
        let pipeline = self.pipeline(&timeline, &limit);
        let Self { bench, options, micro, model, ranks, .. } = self;
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let [p10, median, p90] = [0.1, 0.5, 0.9].map(|share| quantile(&sorted, share));
        let tokens = options.global_batch * options.seq_len;
        let tokens_per_second = tokens as f64 / median;
        let flops_per_token = 3.0 * model.forward_flops_per_token(options.seq_len);
        let peak = match self.peak {
            Some(Peak { flops, source }) => PeakOfDevice { flops, source: source.to_owned() },
            None => PeakOfDevice {
                flops: self.machine.half_flops,
                source: "a large matrix product, measured now by all ranks at once".to_owned(),
            },
        };
        let report = Report {
            title: title.to_owned(),
            device: self.device,
            ranks: ranks.len(),
            parameters: self.spec.units.iter().map(UnitSpec::elements).sum(),
            dtype: options.dtype,
            tokens_per_step: tokens,
            micro_batches: micro.count,
            sequences: micro.sequences,
            seq_len: options.seq_len,
            warm_up_steps: bench.warm_up,
            timed_steps: bench.timed,
            step_seconds: StepSeconds { median, p10, p90, all: self.seconds },
            tokens_per_second,
            flops_per_token,
            mfu: flops_per_token * tokens_per_second / (peak.flops * ranks.len() as f64),
            peak,
            limit_seconds: limit.seconds,
            fraction_of_limit: limit.seconds / median,
            rates: self.machine,
            memory: ranks.into_iter().map(|rank| rank.memory).collect(),
            profiled_step_seconds: timeline.seconds,
            instructions,
            communication,
            pipeline,
            notes: self.notes,
        };
        (report, timeline)
    }

    /// Of the steps that were looked into, that of median length.
    fn timeline(&self) -> Timeline {
        let steps = self.ranks.iter().map(|rank| rank.spans.len()).min().unwrap_or(0);
        let step =
            |index: usize| -> Vec<Vec<Span>> { self.ranks.iter().map(|rank| rank.spans[index].clone()).collect() };
        let mut all: Vec<_> = (0..steps).map(|index| (Timeline::between(&step(index)), index)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (seconds, index) = all[all.len() / 2];
        Timeline { machine: self.machine.clone(), ranks: step(index), seconds }
    }

    fn communication(&self, measured: &Timeline, limit: &Timeline) -> Vec<RankCommunication> {
        let of = |rank: usize| RankCommunication {
            rank,
            measured: measured.communication(self.plan, rank),
            floor: limit.communication(self.plan, rank),
        };
        if self.ranks.len() > 1 { (0..self.ranks.len()).map(of).collect() } else { Vec::new() }
    }

    fn pipeline(&self, measured: &Timeline, limit: &Timeline) -> Option<Pipeline> {
        let mesh = self.plan.options.mesh;
        if mesh.pp == 1 {
            return None;
        }
        let known = |rank: usize, index: usize| {
            let span = measured.ranks[rank].get(index)?;
            (self.plan.ranks[rank].train.instrs[index].lane == Lane::Compute).then_some(span.end - span.start)
        };
        let predicted = estimate_with(self.plan, self.spec, &self.machine, known);
        let stage = |stage: u32| {
            let rank = (stage * mesh.dp) as usize;
            let idle = |timeline: &Timeline| timeline.idle(self.plan, rank);
            Stage { stage, measured: idle(measured), predicted: idle(&predicted), at_limit: idle(limit) }
        };
        Some(Pipeline {
            schedule: self.options.pp_schedule,
            formula: self.plan.options.schedule.bubble(mesh.pp, self.micro.count),
            stages: (0..mesh.pp).map(stage).collect(),
        })
    }
}

/// The value below which this share of the ascending values lies, between two of them in proportion.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = share * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Instructions that do the same, those that take most first.
fn kinds(plan: &Plan, spec: &ModelSpec, measured: &Timeline, limit: &Timeline) -> Vec<Kind> {
    #[derive(Default)]
    struct Sum {
        ranks: std::collections::BTreeSet<usize>,
        count: f64,
        seconds: f64,
        floor: f64,
    }
    let mut sums: BTreeMap<(String, Lane), Sum> = BTreeMap::new();
    for (rank, of_rank) in plan.ranks.iter().enumerate() {
        let spans = measured.ranks[rank].iter().zip(&limit.ranks[rank]);
        for (instr, (span, floor)) in of_rank.train.instrs.iter().zip(spans) {
            let sum = sums.entry((kind(&instr.op.label(spec)), instr.lane)).or_default();
            sum.ranks.insert(rank);
            sum.count += 1.0;
            sum.seconds += span.end - span.start;
            sum.floor += floor.end - floor.start;
        }
    }
    let kind = |((what, lane), sum): ((String, Lane), Sum)| {
        let ranks = sum.ranks.len();
        let each = |total: f64| total / ranks as f64;
        Kind { what, lane, ranks, count: each(sum.count), seconds: each(sum.seconds), floor_seconds: each(sum.floor) }
    };
    let mut all: Vec<Kind> = sums.into_iter().map(kind).collect();
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all
}

/// What an instruction does, whichever block and micro-batch it does it for: `forward h.*` of `forward h.3, micro-batch 1`.
fn kind(label: &str) -> String {
    let number = |text: &str| text.parse::<u64>().is_ok();
    let words = label.split(", ").next().unwrap_or(label).split(' ').filter(|word| !number(word));
    let words = words.map(|word| {
        let parts = word.split('.').map(|part| if number(part) { "*" } else { part });
        parts.collect::<Vec<_>>().join(".")
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_all_blocks_are_of_one_kind() {
        let _limit = testkit::time_limit(10);
        for (label, short) in [
            ("forward h.3, micro-batch 1", "forward h.*"),
            ("adam 12 units", "adam units"),
            ("send output gradient of h.11, micro-batch 0, to rank 2", "send output gradient of h.*"),
            ("all-gather norms and losses", "all-gather norms and losses"),
            ("load batch, micro-batch 0", "load batch"),
            ("backward model.layers.7, micro-batch 0", "backward model.layers.*"),
        ] {
            assert_eq!(kind(label), short);
        }
    }

    #[test]
    fn quantiles_lie_between_values() {
        let _limit = testkit::time_limit(10);
        let ten: Vec<f64> = (0..=10).map(f64::from).collect();
        assert_eq!([0.1, 0.5, 0.9].map(|share| quantile(&ten, share)), [1.0, 5.0, 9.0]);
        assert_eq!(quantile(&[1.0, 2.0], 0.5), 1.5);
        assert_eq!(quantile(&[3.0], 0.9), 3.0);
    }
}
