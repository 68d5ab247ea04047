//! `gpurun doctor` on a machine with or without a GPU.

mod common;

use common::{gpurun, run};

/// As on a machine with no GPU and no library of NVIDIA's in reach of the variables.
fn doctor(words: &[&str]) -> std::process::Command {
    let mut command = gpurun(&["doctor"]);
    command.args(words).env("CUDA_VISIBLE_DEVICES", "").env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

#[test]
fn it_names_what_is_there_and_what_brings_the_rest() {
    let _limit = testkit::time_limit(60);
    let done = run(doctor(&[]));
    assert_eq!(done.code, 0, "{done:?}");
    for name in ["processor", "memory", "disk", "cache", "driver", "NVRTC", "cuBLASLt", "cuDNN", "NCCL", "GPUs", "so"] {
        assert!(done.stdout.lines().any(|line| line.split(' ').next() == Some(name)), "{name}: {done:?}");
    }
    assert!(done.stdout.contains("train on the CPU"), "{done:?}");
}

#[test]
fn json_is_one_object_with_the_same_facts() {
    let _limit = testkit::time_limit(60);
    let done = run(doctor(&["--json"]));
    assert_eq!(done.code, 0, "{done:?}");
    let report: serde_json::Value = serde_json::from_str(&done.stdout).expect("one JSON object");
    let total = report["memory"]["total"].as_u64().expect("bytes");
    let kib = std::fs::read_to_string("/proc/meminfo").expect("Linux tells its memory");
    let kib: u64 =
        kib.lines().next().and_then(|line| line.split_whitespace().nth(1)).expect("MemTotal").parse().unwrap();
    assert_eq!(total, kib << 10);
    assert!(report["memory"]["available"].as_u64() <= Some(total));
    let names: Vec<_> = report["libraries"].as_array().expect("a list").iter().map(|l| l["name"].clone()).collect();
    assert_eq!(names, ["cuda", "nvrtc", "cublasLt", "cudnn", "nccl"]);
    assert_eq!(report["faults"], serde_json::json!([]));
}

#[test]
fn what_is_there_and_does_not_work_is_said_with_exit_code_2() {
    let _limit = testkit::time_limit(60);
    let room = tempfile::tempdir().expect("a folder");
    let file = room.path().join("no folder");
    std::fs::write(&file, "").expect("a file");
    let mut command = doctor(&[]);
    let nccl = room.path().join("libnccl.so.2");
    std::fs::write(&nccl, "no library").expect("a file");
    command.env("XDG_CACHE_HOME", &file).env("GPURUN_NCCL_PATH", &nccl);
    let done = run(command);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.cause().contains("XDG_CACHE_HOME") && done.cause().contains("libnccl.so.2"), "{done:?}");
    let done = run(doctor(&["--out", "/nowhere/at/all"]));
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.cause().contains("/nowhere/at/all"), "{done:?}");
}
