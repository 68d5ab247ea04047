//! Checkpoints have no layout: what four ranks of stage 3 with their state on the host wrote is the same state on any other
//! ranks, and back.

mod common;

use common::{Case, Outcome, assert_same_bits, gpt2, llama};
use gpurun_plan::OffloadVia;
use gpurun_types::DType;

/// Losses from the same state, of other ranks: sums of fp32 gradients in another order, through three steps of Adam.
const TOLERANCE: f64 = 1e-4;

fn assert_same_state(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.state.keys().collect::<Vec<_>>(), b.state.keys().collect::<Vec<_>>());
    for (key, values) in &a.state {
        assert!(common::bits(values) == common::bits(&b.state[key]), "{what}: {key:?} differs");
    }
}

#[test]
fn state_goes_from_four_ranks_to_any_and_back() {
    let _limit = testkit::time_limit(180);
    for (model, dtype, moments) in
        [(gpt2(), DType::F32, DType::F32), (llama(), DType::Bf16, DType::F32), (gpt2(), DType::Bf16, DType::Bf16)]
    {
        let room = tempfile::tempdir().expect("a folder");
        let at = |name: &str| Some(room.path().join(name));
        let step = |name: &str, step: u64| Some(room.path().join(name).join(format!("step-{step:08}")));
        let plain = Case { dtype, moments, ..Case::plain(model) };
        let four = Case { ranks: 4, stage: 3, offload: Some(OffloadVia::Host), ..plain.clone() };
        let whole = Case { steps: 6, ..four.clone() }.run();
        let first = Case { save: at("first"), ..four.clone() }.run();
        // The same ranks go on as if nothing had been.
        let unbroken = Case { resume: step("first", 3), ..four.clone() }.run();
        assert_eq!(unbroken.losses, whole.losses[3..]);
        assert_same_state(&unbroken, &whole, "saved and resumed");
        for ranks in [1, 2, 3] {
            for stage in 0..=3 {
                let offload =
                    [None, Some(OffloadVia::Stream), Some(OffloadVia::Host)][(ranks + stage as u32) as usize % 3];
                let other = Case { ranks, stage, offload, resume: step("first", 3), ..plain.clone() };
                let what = format!("{other:?}");
                assert_same_state(&Case { steps: 0, ..other.clone() }.run(), &first, &what);
                let name = format!("{ranks}-{stage}");
                let next = Case { save: at(&name), ..other }.run();
                for (loss, want) in next.losses.iter().zip(&whole.losses[3..]) {
                    assert!((loss - want).abs() < TOLERANCE * want, "{what}: {loss}, not {want}");
                }
                let back = Case { resume: step(&name, 6), steps: 0, ..four.clone() }.run();
                assert_same_state(&back, &next, &format!("{what}, and back"));
            }
        }
    }
}

#[test]
fn stages_of_one_number_of_ranks_go_on_with_the_same_bits() {
    let _limit = testkit::time_limit(60);
    let room = tempfile::tempdir().expect("a folder");
    let four = Case { ranks: 4, dtype: DType::Bf16, ..Case::plain(gpt2()) };
    let whole = Case { steps: 6, ..four.clone() }.run();
    let save = Some(room.path().to_owned());
    Case { stage: 3, offload: Some(OffloadVia::Host), save, ..four.clone() }.run();
    for stage in 0..=3 {
        let resumed = Case { stage, resume: Some(room.path().join("step-00000003")), ..four.clone() }.run();
        let want = Outcome { losses: whole.losses[3..].to_vec(), norms: whole.norms[3..].to_vec(), ..whole.clone() };
        assert_same_bits(&resumed, &want, &format!("stage {stage}"));
    }
}
