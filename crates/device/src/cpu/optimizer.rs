//! Norms and the decisions of a step: every operation rounded by itself, so that all backends give the same bits.

use gpurun_types::DType;

use super::{CpuBackend, Result, Shared, is, kernels, shape};
use crate::{NormRun, ScalarSlot, StepScalars};

/// Elements whose squares are summed by themselves.
const NORM_PIECE: usize = 4096;
/// Sums that the pieces' sums are added up in.
const NORM_TOTALS: usize = 256;

impl CpuBackend {
    pub(super) fn norm_partial_op(&self, runs: &[NormRun]) -> Result {
        runs.iter().try_for_each(NormRun::check)?;
        for run in runs {
            let src = self.read::<f32>(run.src);
            let mut sums = vec![0.0f64; src.len().div_ceil(NORM_PIECE)];
            let shared = Shared::new(&mut sums);
            self.pieces(src.len(), 16 * NORM_PIECE, |range| {
                let first = range.start / NORM_PIECE;
                for (i, piece) in src[range].chunks(NORM_PIECE).enumerate() {
                    shared.part(first + i..first + i + 1)[0] = kernels::square_sum(piece);
                }
            });
            self.write::<f64>(run.partial)[0] = total(&sums);
        }
        Ok(())
    }

    pub(super) fn step_scalars_op(&self, args: &StepScalars) -> Result {
        const OP: &str = "step_scalars";
        is(OP, "partials", args.partials, DType::F64, args.shards * args.row)?;
        is(OP, "scalars", args.scalars, DType::F32, ScalarSlot::COUNT)?;
        is(OP, "learning_rate", args.learning_rate, DType::F32, 1)?;
        if args.units > args.row {
            return Err(shape(OP, format!("{} units in rows of {}", args.units, args.row)));
        }
        let partials = self.read::<f64>(args.partials);
        let learning_rate = self.read::<f32>(args.learning_rate)[0];
        decide(args, partials, learning_rate, self.write::<f32>(args.scalars));
        Ok(())
    }
}

/// The sums of all pieces together; see [`crate::Backend::norm_partial`].
fn total(sums: &[f64]) -> f64 {
    let mut totals = [0.0f64; NORM_TOTALS];
    for row in sums.chunks(NORM_TOTALS) {
        for (total, sum) in totals.iter_mut().zip(row) {
            *total += sum;
        }
    }
    kernels::halves(totals)
}

/// What `step_scalars` computes; see [`StepScalars`].
fn decide(args: &StepScalars, partials: &[f64], learning_rate: f32, scalars: &mut [f32]) {
    let mut total = 0.0;
    for unit in 0..args.units {
        let mut sum = 0.0;
        for shard in 0..args.shards {
            sum += partials[shard * args.row + unit];
        }
        total += sum;
    }
    let slot = |s: ScalarSlot| s as usize;
    let scale = scalars[slot(ScalarSlot::LossScale)];
    let norm = total.sqrt() / f64::from(scale);
    let skip = !norm.is_finite();
    scalars[slot(ScalarSlot::UsedLossScale)] = scale;
    scalars[slot(ScalarSlot::GradNorm)] = norm as f32;
    scalars[slot(ScalarSlot::Skip)] = f32::from(u8::from(skip));
    scalars[slot(ScalarSlot::LearningRate)] = learning_rate;
    let clip = (f64::from(args.clip) / (norm + 1e-6)).min(1.0);
    scalars[slot(ScalarSlot::GradFactor)] = (clip / f64::from(scale)) as f32;
    if skip {
        scalars[slot(ScalarSlot::SkippedSteps)] += 1.0;
        scalars[slot(ScalarSlot::SkippedInARow)] += 1.0;
        scalars[slot(ScalarSlot::GoodSteps)] = 0.0;
        if let Some(s) = args.scaling {
            scalars[slot(ScalarSlot::LossScale)] = (scale * s.backoff).max(s.min);
        }
        return;
    }
    scalars[slot(ScalarSlot::SkippedInARow)] = 0.0;
    let steps = scalars[slot(ScalarSlot::AdamSteps)] + 1.0;
    scalars[slot(ScalarSlot::AdamSteps)] = steps;
    scalars[slot(ScalarSlot::BiasCorrection1)] = (1.0 - power(f64::from(args.beta1), steps as u32)) as f32;
    scalars[slot(ScalarSlot::BiasCorrection2Sqrt)] = (1.0 - power(f64::from(args.beta2), steps as u32)).sqrt() as f32;
    let good = scalars[slot(ScalarSlot::GoodSteps)] + 1.0;
    scalars[slot(ScalarSlot::GoodSteps)] = good;
    if let Some(s) = args.scaling
        && good >= s.interval as f32
    {
        scalars[slot(ScalarSlot::LossScale)] = (scale * s.growth).min(s.max);
        scalars[slot(ScalarSlot::GoodSteps)] = 0.0;
    }
}

/// `base^exponent` by repeated squaring: the same multiplications on every machine, unlike a library's `pow`.
fn power(base: f64, exponent: u32) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}
