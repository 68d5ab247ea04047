//! What this machine has: GPUs and processor cores, found without touching a driver.

use std::collections::BTreeSet;
use std::path::Path;

/// Workers for `--nproc auto`: one per GPU, or what the processor can carry.
pub fn default_workers() -> u32 {
    match gpus() {
        0 => cpu_workers(),
        count => count,
    }
}

/// One worker per two physical cores that this process may use, at least one: a worker's matrix products want threads of
/// their own, and a core of a pair is left to copies and to the data.
pub fn cpu_workers() -> u32 {
    (physical_cores() / 2).max(1)
}

/// GPUs that may be used: NVIDIA device files, cut down by `CUDA_VISIBLE_DEVICES`.
pub fn gpus() -> u32 {
    let found = std::fs::read_dir("/dev").map_or(0, |entries| {
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok())).count()
    });
    visible(found as u32, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

/// How many of `found` devices a value of `CUDA_VISIBLE_DEVICES` leaves: entries up to the first one that is no device.
fn visible(found: u32, value: Option<&str>) -> u32 {
    let Some(value) = value else { return found };
    let entries = value.split(',').map(str::trim);
    let valid = |entry: &&str| match entry.parse::<i64>() {
        Ok(index) => (0..i64::from(found)).contains(&index),
        Err(_) => entry.starts_with("GPU-") || entry.starts_with("MIG-"),
    };
    if found == 0 { 0 } else { entries.take_while(valid).count() as u32 }
}

/// Threads for each of `workers` workers, so that all together use what this process may use.
pub fn threads_per_worker(workers: u32) -> u32 {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    (threads / workers).max(1)
}

/// Processes that the kernel has killed for lack of memory since the machine started; `None` where it does not tell.
pub fn out_of_memory_kills() -> Option<u64> {
    let counters = std::fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// Physical cores that this process may run on (affinity and control-group quota counted).
fn physical_cores() -> u32 {
    let allowed = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    let Ok(affinity) = rustix::thread::sched_getaffinity(None) else { return allowed };
    let mut cores = BTreeSet::new();
    for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| affinity.is_set(*cpu)) {
        let topology = Path::new("/sys/devices/system/cpu").join(format!("cpu{cpu}/topology"));
        let read = |name: &str| std::fs::read_to_string(topology.join(name)).ok();
        match (read("physical_package_id"), read("core_id")) {
            (Some(package), Some(core)) => cores.insert((package, core)),
            // No topology (some containers): each processor counts as a core.
            _ => cores.insert((String::new(), cpu.to_string())),
        };
    }
    allowed.min(cores.len() as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_follow_the_drivers_rule() {
        let _limit = testkit::time_limit(10);
        assert_eq!(visible(8, None), 8);
        assert_eq!(visible(8, Some("")), 0);
        assert_eq!(visible(8, Some("0,3")), 2);
        assert_eq!(visible(8, Some("0, 3,-1,4")), 2);
        assert_eq!(visible(2, Some("0,7,1")), 1);
        assert_eq!(visible(2, Some("GPU-8932f937,MIG-1")), 2);
        assert_eq!(visible(0, Some("0")), 0);
    }

    #[test]
    fn there_is_always_a_worker_and_a_thread() {
        let _limit = testkit::time_limit(10);
        assert!(cpu_workers() >= 1);
        assert_eq!(threads_per_worker(4096), 1);
        assert!(threads_per_worker(1) >= cpu_workers());
    }
}
