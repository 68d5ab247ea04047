//! What must not change the result does not: ranks, stages, micro-batches, the type of moments, the loss scale. `matrix.rs` walks
//! all settings together.
//!
//! Where sums have the same order the same bits are asked for, of losses, norms, weights and both moments. Another number
//! of ranks or micro-batches adds the same gradients in another order: then tensors are equal within rounding.

mod common;

use common::{Case, assert_near, assert_same_bits, distance, gpt2, llama};
use gpurun_plan::OffloadVia;
use gpurun_types::DType;

#[test]
fn training_changes_the_weights_and_lowers_the_loss() {
    let _limit = testkit::time_limit(60);
    // The same batch again and again: its loss must fall.
    let case = Case { steps: 30, ..Case::plain(gpt2()) };
    let out = case.run();
    assert!(out.losses[29] < out.losses[0], "{:?}", out.losses);
}

#[test]
fn the_number_of_ranks_changes_nothing_but_rounding() {
    let _limit = testkit::time_limit(120);
    for model in [gpt2(), llama()] {
        let one = Case::plain(model.clone()).run();
        for ranks in [2, 3, 4] {
            let case = Case { ranks, ..Case::plain(model.clone()) };
            let many = case.run();
            // fp32 sums of 12 sequences in another order, through 3 Adam steps; v is a square of such sums.
            assert_near(&many, &one, 2e-4, &format!("{:?}, {ranks} ranks", model.family));
            assert_same_bits(&many, &case.run(), "the same again");
        }
    }
}

#[test]
fn micro_batches_change_nothing_but_rounding() {
    let _limit = testkit::time_limit(120);
    let one = Case::plain(gpt2()).run();
    for (ranks, micro_batches) in [(1, 4), (2, 3), (3, 4), (1, 12)] {
        let many = Case { ranks, micro_batches, ..Case::plain(gpt2()) }.run();
        assert_near(&many, &one, 2e-4, &format!("{ranks} ranks, {micro_batches} micro-batches"));
    }
}

#[test]
fn stages_give_the_same_bits() {
    let _limit = testkit::time_limit(180);
    for model in [gpt2(), llama()] {
        for dtype in [DType::F32, DType::Bf16] {
            for ranks in [1, 2, 3, 4] {
                let run = |stage, micro_batches| {
                    Case { ranks, stage, micro_batches, dtype, steps: 2, ..Case::plain(model.clone()) }.run()
                };
                let zero = run(0, 1);
                for stage in 1..=3 {
                    assert_same_bits(&run(stage, 1), &zero, &format!("{dtype} stage {stage}, {ranks} ranks"));
                }
            }
            let run =
                |stage| Case { ranks: 2, stage, micro_batches: 3, dtype, steps: 2, ..Case::plain(model.clone()) }.run();
            assert_same_bits(&run(1), &run(0), &format!("{dtype} stage 1 and 0, 3 micro-batches"));
            assert_same_bits(&run(3), &run(2), &format!("{dtype} stage 3 and 2, 3 micro-batches"));
        }
    }
}

#[test]
fn moments_in_bf16_are_the_same_bits_in_every_stage_and_place() {
    let _limit = testkit::time_limit(60);
    for model in [gpt2(), llama()] {
        for dtype in [DType::F32, DType::Bf16] {
            let plain = Case { dtype, moments: DType::Bf16, ..Case::plain(model.clone()) };
            for ranks in [1, 3] {
                let base = Case { ranks, ..plain.clone() };
                let want = base.run();
                for stage in 0..=3 {
                    for offload in [None, Some(OffloadVia::Host), Some(OffloadVia::Stream)] {
                        let fraction = if stage == 2 { 0.5 } else { 1.0 };
                        let case = Case { stage, offload, fraction, ..base.clone() };
                        assert_same_bits(&case.run(), &want, &format!("{case:?}"));
                    }
                }
                for ((name, state), values) in &want.state {
                    let narrow = values.iter().all(|v| v.to_bits() & 0xffff == 0);
                    assert!(*state == 0 || narrow, "moment {state} of {name} is kept in bf16");
                }
            }
        }
    }
}

#[test]
fn moments_in_bf16_train_like_those_in_fp32() {
    let _limit = testkit::time_limit(60);
    let case = Case { steps: 40, ..Case::plain(gpt2()) };
    let (wide, narrow) = (case.run(), Case { moments: DType::Bf16, ..case }.run());
    assert_ne!(wide.state, narrow.state);
    // The first step reads no moment that was rounded.
    assert_eq!(wide.losses[..2], narrow.losses[..2]);
    for (step, (x, y)) in narrow.losses.iter().zip(&wide.losses).enumerate() {
        // A moment errs by up to 2^-7 of itself, up or down as often; updates err by as much, weights by far less.
        assert!((x - y).abs() < 5e-3 * y, "step {step}: losses {x} and {y}");
    }
}

#[test]
fn half_precision_stays_near_fp32() {
    let _limit = testkit::time_limit(60);
    let exact = Case { steps: 8, ..Case::plain(gpt2()) }.run();
    // One bf16 rounding is 2^-9; losses average over 144 tokens.
    for (dtype, tolerance) in [(DType::Bf16, 2e-2), (DType::F16, 5e-3)] {
        let half = Case { dtype, steps: 8, ..Case::plain(gpt2()) }.run();
        for (x, y) in half.losses.iter().zip(&exact.losses) {
            assert!((x - y).abs() < tolerance * y, "{dtype}: losses {x} and {y}");
        }
    }
}

#[test]
fn loss_scaling_backs_off_skips_and_grows() {
    let _limit = testkit::time_limit(60);
    for offload in [None, Some(OffloadVia::Host), Some(OffloadVia::Stream)] {
        for (ranks, stage) in [(1, 0), (2, 0), (2, 3)] {
            let base = Case { dtype: DType::F16, ranks, stage, offload, ..Case::plain(gpt2()) };
            // fp16 ends at 65504: gradients scaled by 2^30 overflow.
            let case = Case { loss_scale: Some(2f32.powi(30)), steps: 24, ..base.clone() };
            let out = case.run();
            let skipped = out.skipped.iter().take_while(|s| **s).count();
            assert!(skipped > 3, "a scale of 2^30 overflows: {:?}", out.skipped);
            assert_eq!(out.loss_scales[skipped], 2f32.powi(30 - skipped as i32), "each skip halves the scale");
            assert!(out.skipped[skipped..].iter().any(|s| !s), "training goes on");
            assert!(out.losses.iter().all(|l| l.is_finite()), "weights are left alone: {:?}", out.losses);
            // Nothing but skipped steps: weights are as they began, moments zero.
            let only = Case { steps: skipped as u64, ..case.clone() }.run();
            let begun = Case { steps: 0, ..base.clone() }.run();
            assert_eq!(only.state, begun.state, "a skipped step changes no state");
        }
    }
}

#[test]
fn the_loss_scale_does_not_change_what_is_learned() {
    let _limit = testkit::time_limit(60);
    let plain = Case { dtype: DType::F16, loss_scale: Some(1024.0), ..Case::plain(gpt2()) }.run();
    let scaled = Case { dtype: DType::F16, loss_scale: Some(4096.0), ..Case::plain(gpt2()) }.run();
    assert_eq!(plain.skipped, vec![false; 3]);
    assert_eq!(scaled.skipped, vec![false; 3]);
    // Powers of two scale exactly, but small fp16 gradients are subnormal and round more coarsely at the lower scale.
    // Moments of such gradients show it; losses do not.
    let worst = distance(&scaled, &plain);
    assert!(worst < 5e-2, "{worst:e}");
    for (x, y) in scaled.losses.iter().zip(&plain.losses) {
        assert!((x - y).abs() < 1e-4 * y, "{x} {y}");
    }
}
