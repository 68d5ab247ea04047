//! Is there host memory for all ranks of this machine? Asked before any of them allocates.

use std::fs;

use gpurun_plan::Sketch;
use gpurun_types::{Bytes, Place, Rank};
use serde::{Deserialize, Serialize};

use crate::fit::{DoesNotFit, Planner, Room, explain};
use crate::host::{HostMemory, host_memory};
use crate::options::TrainOptions;
use crate::train::{RankPlace, TrainError};

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct Told {
    /// Ranks with equal words share host memory.
    host: String,
    available: Bytes,
}

/// Refuses a run whose ranks need more host memory than there is. Device arenas count too where they are host memory.
///
/// # Errors
/// When the ranks that share this host need more than is available to them, or host memory cannot be known.
pub(crate) fn check(
    planner: &Planner<'_>,
    options: &TrainOptions,
    place: &RankPlace<'_>,
    on_cpu: bool,
) -> Result<(), TrainError> {
    let memory = host_memory().map_err(|e| TrainError::Device(format!("how much memory this host has: {e}")))?;
    let mine = Told { host: this_host(), available: memory.available };
    let text = serde_json::to_vec(&mine).expect("words and a number can always be written");
    let mut together = Vec::new();
    let mut least = memory.available;
    // All ranks have looked before any has what the others saw, so none has allocated yet.
    for (rank, told) in place.exchange("host-memory", &text)?.iter().enumerate() {
        let told: Told = serde_json::from_slice(told).map_err(|e| TrainError::Board(e.to_string()))?;
        if told.host == mine.host {
            together.push(Rank(rank as u32));
            least = least.min(told.available);
        }
    }
    let memory = HostMemory { available: least, ..memory };
    refusal(planner, options, &together, &memory, on_cpu)?
        .map_or(Ok(()), |no| Err(TrainError::DoesNotFit(Box::new(no))))
}

/// Words that are the same for processes that share memory and its limit: the machine, and the control group as it is called in
/// its namespace.
fn this_host() -> String {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
    format!("{} {} {}", read("/proc/sys/kernel/random/boot_id"), namespace.display(), read("/proc/self/cgroup"))
}

/// Why the ranks `together` do not fit this host; `None` when they do.
fn refusal(
    planner: &Planner<'_>,
    options: &TrainOptions,
    together: &[Rank],
    memory: &HostMemory,
    on_cpu: bool,
) -> Result<Option<DoesNotFit>, TrainError> {
    let replicas = options.mesh(planner.world)?.dp;
    let needed = |sketch: &Sketch| -> Bytes {
        let stage = |rank: &Rank| &sketch.stages[(rank.0 / replicas) as usize];
        let on_device = |rank: &Rank| if on_cpu { stage(rank).device_bytes } else { Bytes(0) };
        together.iter().map(|rank| stage(rank).host_bytes + on_device(rank)).sum()
    };
    let total = needed(&planner.sketch(options)?.1);
    if total <= memory.available {
        return Ok(None);
    }
    let who =
        if together.len() == 1 { "this rank needs".to_owned() } else { format!("{} ranks here need", together.len()) };
    let what = match &memory.limit {
        None => format!("{who} {total} of host memory, and {} of {} are available", memory.available, memory.total),
        Some(limit) => format!(
            "{who} {total} of host memory, and {} are available: control group {} allows {}, of which {} are in use",
            memory.available,
            limit.group.display(),
            limit.limit,
            limit.used
        ),
    };
    let places: &[Place] = if on_cpu { &[Place::Device, Place::Host] } else { &[Place::Host] };
    // On the CPU the device's memory is the host's: offload only moves it.
    let room = Room { limit: memory.available, needed: &needed, places, turn_off: true };
    Ok(Some(explain(planner, options, what, &room)?))
}

#[cfg(test)]
mod tests {
    // A failed unwrap is a failed test.
    #![allow(clippy::unwrap_used)]

    use gpurun_device::CpuSizes;

    use super::*;
    use crate::host::MemoryLimit;
    use crate::options::TrainArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        train: TrainArgs,
    }

    /// What is said of `ranks` ranks on a host with so much available.
    fn said(line: &str, ranks: u32, available: u64, on_cpu: bool) -> Option<String> {
        let options = Line::parse_from(std::iter::once("train").chain(line.split(' '))).train.resolve().unwrap();
        let options = TrainOptions { offload_via: Some(gpurun_plan::OffloadVia::Host), ..options };
        let model = options.model.config.build().unwrap();
        let planner = Planner { model: &model, world: ranks, sizes: &CpuSizes };
        let limit = MemoryLimit { group: "/sys/fs/cgroup/job".into(), limit: Bytes(9 << 30), used: Bytes(1 << 30) };
        let memory = HostMemory { total: Bytes(64 << 30), available: Bytes(available), limit: Some(limit) };
        let together: Vec<Rank> = (0..ranks).map(Rank).collect();
        refusal(&planner, &options, &together, &memory, on_cpu).unwrap().map(|no| no.to_string())
    }

    #[test]
    fn the_ranks_of_a_host_together_fit_or_are_refused_with_what_would_fit() {
        let _limit = testkit::time_limit(20);
        let line = "--model gpt2-124m --seq-len 64 --global-batch 8 --offload optimizer --dtype bf16";
        let needed = |ranks, on_cpu| {
            let text = said(line, ranks, 0, on_cpu).unwrap();
            let number = text.split(" need").nth(1).unwrap().split(" of host").next().unwrap().trim_start_matches('s');
            number.trim().strip_suffix(" GiB").unwrap().parse::<f64>().unwrap()
        };
        // Two ranks of stage 0 hold everything twice; device memory is host memory on the CPU only.
        assert!((needed(2, false) / needed(1, false) - 2.0).abs() < 0.01);
        assert!(needed(1, true) > needed(1, false) + 0.5);
        let enough = ((needed(2, false) + 0.01) * f64::from(1 << 30)) as u64;
        assert_eq!(said(line, 2, enough, false), None);
        let text = said(line, 2, enough / 2, false).unwrap();
        assert!(text.starts_with("does not fit: 2 ranks here need "), "{text}");
        assert!(
            text.contains("control group /sys/fs/cgroup/job allows 9.00 GiB, of which 1.00 GiB are in use"),
            "{text}"
        );
        assert!(
            text.contains("  master weights") && text.contains("largest: ") && !text.contains("activations"),
            "{text}"
        );
        // Sharding halves it, but for padding; or the state stays on the device.
        assert!(
            text.contains("it would fit with --offload none") || text.contains("it would fit with --zero"),
            "{text}"
        );
        let text = said(line, 2, enough / 2, true).unwrap();
        assert!(text.contains("activations"), "{text}");
        assert!(said("--model gpt2-124m --global-batch 1", 1, 1 << 20, true).unwrap().contains("no change of"));
    }
}
