//! The report for people.

use std::fmt::Write as _;

use gpurun_types::Bytes;

use super::RankMemory;
use super::report::{Kind, Pipeline, RankCommunication, Report};
use crate::options::spelled;

/// Kinds of instructions that are shown; the rest is a few microseconds.
const KINDS: usize = 24;

pub(super) fn text(report: &Report) -> String {
    let mut text = head(report);
    if let Some(memory) = most(&report.memory) {
        text += &held(memory);
    }
    text += &instructions(report);
    if let Some(worst) = report.communication.iter().max_by(|a, b| exposed(a).total_cmp(&exposed(b))) {
        text += &communication(worst, report.ranks);
    }
    if let Some(pipeline) = &report.pipeline {
        text += &stages(pipeline);
    }
    text.trim_end().to_owned()
}

fn head(report: &Report) -> String {
    let each = if report.ranks > 1 { " each" } else { "" };
    let seconds = &report.step_seconds;
    format!(
        "{}\n{:.1} M parameters on {}{each}\n\
         {:.0} tokens/s: {} a step (median of {} after {}; p10 {}, p90 {}), {} tokens\n\
         mfu {:.1} % of {}FLOP/s{each} ({})\n\
         {:.1} % of the limit: {} a step at these rates\n  {}\n",
        report.title,
        report.parameters as f64 / 1e6,
        report.device,
        report.tokens_per_second,
        time(seconds.median),
        report.timed_steps,
        report.warm_up_steps,
        time(seconds.p10),
        time(seconds.p90),
        report.tokens_per_step,
        100.0 * report.mfu,
        metric(report.peak.flops),
        report.peak.source,
        100.0 * report.fraction_of_limit,
        time(report.limit_seconds),
        report.rates.describe()
    )
}

/// The rank that holds most.
fn most(ranks: &[RankMemory]) -> Option<&RankMemory> {
    ranks.iter().max_by_key(|rank| (rank.device_planned_bytes, rank.host_planned_bytes, std::cmp::Reverse(rank.rank)))
}

fn held(memory: &RankMemory) -> String {
    let mut text = format!("\nmemory of rank {}\n", memory.rank);
    for item in &memory.items {
        let _ = writeln!(text, "  {:<22} {:>12}  {}", item.name, item.bytes.to_string(), item.place);
    }
    let mut total = |place: &str, planned: Bytes, allocated: Bytes, used: Option<Bytes>| {
        if planned.0 > 0 || allocated.0 > 0 {
            let used = used.map_or_else(|| "not known".to_owned(), |used| used.to_string());
            let _ = writeln!(
                text,
                "  {:<22} {:>12}  {place}; allocated {allocated}, in use {used}",
                "planned",
                planned.to_string()
            );
        }
    };
    total("device", memory.device_planned_bytes, memory.device_allocated_bytes, memory.device_used_bytes);
    total("host", memory.host_planned_bytes, memory.host_allocated_bytes, memory.host_used_bytes);
    text
}

fn instructions(report: &Report) -> String {
    let mut text = format!(
        "\na step that was looked into took {}; of a rank that has such instructions:\n  {:<34} {:<9} {:>7} {:>11} {:>11} {:>8}\n",
        time(report.profiled_step_seconds),
        "instructions",
        "lane",
        "times",
        "time",
        "floor",
        "x floor"
    );
    for Kind { what, lane, count, seconds, floor_seconds, .. } in report.instructions.iter().take(KINDS) {
        let over = if *floor_seconds > 0.0 { format!("{:.2}", seconds / floor_seconds) } else { String::new() };
        let lane = lane.to_string();
        let (seconds, floor) = (time(*seconds), time(*floor_seconds));
        let _ = writeln!(text, "  {what:<34} {lane:<9} {count:>7.0} {seconds:>11} {floor:>11} {over:>8}");
    }
    text
}

fn exposed(of: &RankCommunication) -> f64 {
    of.measured.exposed_collectives + of.measured.exposed_messages
}

fn communication(worst: &RankCommunication, ranks: usize) -> String {
    let RankCommunication { rank, measured, floor } = worst;
    let mut text = format!(
        "\ncommunication of rank {rank}, which waits longest of {ranks}: {} a step (floor {}), of which computation does not hide\n",
        time(measured.seconds),
        time(floor.seconds)
    );
    let mut line = |what: &str, measured: f64, floor: f64| {
        let _ = writeln!(text, "  {what:<28} {:>11}  (floor {})", time(measured), time(floor));
    };
    line("collectives", measured.exposed_collectives, floor.exposed_collectives);
    if measured.exposed_messages > 0.0 || floor.exposed_messages > 0.0 {
        line("messages between stages", measured.exposed_messages, floor.exposed_messages);
    }
    text
}

fn stages(pipeline: &Pipeline) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mut text = format!(
        "\n{} stages in the order of {}: idle {} of a step if all took equally long\n  {:<8} {:>10} {:>10} {:>10}\n",
        pipeline.stages.len(),
        spelled(pipeline.schedule),
        percent(pipeline.formula),
        "idle",
        "measured",
        "predicted",
        "at limit"
    );
    for stage in &pipeline.stages {
        let [measured, predicted, limit] = [stage.measured, stage.predicted, stage.at_limit].map(percent);
        let _ = writeln!(text, "  stage {:<2} {measured:>10} {predicted:>10} {limit:>10}", stage.stage);
    }
    text + "  (predicted: from the measured times of the passes)\n"
}

/// `1.234 s`, `12.34 ms`, `5.6 us`.
fn time(seconds: f64) -> String {
    if seconds >= 1.0 {
        format!("{seconds:.3} s")
    } else if seconds >= 1e-3 {
        format!("{:.2} ms", seconds * 1e3)
    } else {
        format!("{:.1} us", seconds * 1e6)
    }
}

/// `989.4 T`, `145.0 G`.
fn metric(value: f64) -> String {
    if value >= 1e12 { format!("{:.1} T", value / 1e12) } else { format!("{:.1} G", value / 1e9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let _limit = testkit::time_limit(10);
        assert_eq!([2.5, 0.0123, 4.2e-6].map(time), ["2.500 s", "12.30 ms", "4.2 us"]);
        assert_eq!([989.4e12, 1.45e11].map(metric), ["989.4 T", "145.0 G"]);
    }
}
