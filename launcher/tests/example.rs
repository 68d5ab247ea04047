//! The example of a user's own model, under the launcher as a user would start it.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{GPURUN, gpurun, run};

/// `cargo test --workspace` builds it beside the launcher; a run of this file alone builds it here.
fn example() -> PathBuf {
    let path = Path::new(GPURUN).with_file_name("examples").join("custom_model");
    if !path.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "gpurun", "--example", "custom_model"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo runs");
        assert!(status.success(), "the example does not build");
    }
    path
}

#[test]
fn a_users_own_model_trains_sharded_and_resumes() {
    let _limit = testkit::time_limit(300);
    let out = tempfile::tempdir().expect("a folder");
    let start = |words: &[&str]| {
        let mut command = gpurun(&["--nproc", "2"]);
        command.arg(example()).args(["--seq-len", "32", "--global-batch", "8", "--zero", "3", "--dtype", "bf16"]);
        command.arg("--out").arg(out.path()).args(words);
        run(command)
    };
    let done = start(&["--steps", "30"]);
    assert_eq!(done.code, 0, "{done:?}");
    let losses = done.stdout.split("loss ").last().expect("a summary");
    let mut numbers = losses.split([' ', ',']).filter_map(|w| w.parse::<f64>().ok());
    let (first, last) = (numbers.next().expect("the first loss"), numbers.next().expect("the last loss"));
    assert!(last < 0.8 * first, "it learns: {done:?}");
    let done = start(&["--steps", "32", "--resume", "auto"]);
    assert!(done.code == 0 && done.stdout.contains("resuming after step 30"), "{done:?}");
}
