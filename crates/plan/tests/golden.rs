//! Plans in words, compared with files. `UPDATE_GOLDEN=1 cargo test -p gpurun-plan --test golden` rewrites them.

mod common;

use std::path::Path;

use common::{chain, offloaded, options};
use gpurun_plan::{OffloadVia, Plan, PlanOptions, Recompute};
use gpurun_types::DType;

fn compare(name: &str, options: &PlanOptions) {
    let plan = Plan::build(&chain(&[100, 200, 50], true, DType::Bf16), options).expect("a legal configuration");
    let rank = plan.ranks.last().expect("at least one rank");
    let text = format!("train\n{}evaluate\n{}", rank.train_listing(), rank.evaluate_listing());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("the folder can be made");
        std::fs::write(&path, &text).expect("the file can be written");
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, want, "{} differs", path.display());
}

#[test]
fn plans_are_as_they_were() {
    let _limit = testkit::time_limit(20);
    compare("one_rank", &options(1, 0, 2));
    compare("stage_0", &options(2, 0, 1));
    compare("stage_1", &options(2, 1, 2));
    compare("stage_2", &options(2, 2, 2));
    compare("stage_3", &options(2, 3, 1));
    compare("recompute", &PlanOptions { recompute: Recompute::Full, ..options(1, 0, 1) });
    compare("recompute_selective", &PlanOptions { recompute: Recompute::Selective, ..options(2, 3, 1) });
    compare("offload_host", &offloaded(options(2, 2, 1), OffloadVia::Host));
    compare(
        "offload_stream",
        &PlanOptions { offload_fraction: 0.67, ..offloaded(options(1, 0, 1), OffloadVia::Stream) },
    );
}
