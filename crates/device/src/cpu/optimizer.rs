//! Norms, the decisions of a step, and AdamW: every operation rounded by itself, so that all backends give the same bits.

use gpurun_types::{DType, View};
use multiversion::multiversion;

use super::element::{Float, by_float};
use super::{CpuBackend, Result, Shared, float, is, kernels, length, shape};
use crate::{AdamW, ScalarSlot, StepScalars};

/// Elements whose squares are summed in one run; runs are added in order.
pub(crate) const NORM_RUN: usize = 4096;
/// Elements of which gradient, state and new weights are worked on while they are in the first-level cache.
const BLOCK: usize = 1024;

impl CpuBackend {
    pub(super) fn norm_partial_op(&self, src: View, partial: View) -> Result {
        const OP: &str = "norm_partial";
        is(OP, "src", src, DType::F32, src.len)?;
        is(OP, "partial", partial, DType::F64, 1)?;
        let src = self.read::<f32>(src);
        let mut sums = vec![0.0f64; src.len().div_ceil(NORM_RUN)];
        let shared = Shared::new(&mut sums);
        self.pieces(src.len(), 16 * NORM_RUN, |piece| {
            let first = piece.start / NORM_RUN;
            for (i, run) in src[piece].chunks(NORM_RUN).enumerate() {
                shared.part(first + i..first + i + 1)[0] = kernels::square_sum(run);
            }
        });
        self.write::<f64>(partial)[0] = sums.iter().fold(0.0, |total, sum| total + sum);
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

    pub(super) fn adamw_op(&self, args: &AdamW) -> Result {
        const OP: &str = "adamw";
        let len = args.master.len;
        is(OP, "master", args.master, DType::F32, len)?;
        for (name, view) in [("m", args.m), ("v", args.v)] {
            if view.dtype != DType::F32 {
                return Err(shape(OP, format!("{name} is {}; the CPU keeps moments in fp32", view.dtype)));
            }
            length(OP, name, view, len)?;
        }
        float(OP, "grad", args.grad)?;
        length(OP, "grad", args.grad, len)?;
        is(OP, "scalars", args.scalars, DType::F32, ScalarSlot::COUNT)?;
        if let Some(weight) = args.weight {
            float(OP, "weight", weight)?;
            length(OP, "weight", weight, len)?;
        }
        by_float!(args.grad, G => match args.weight {
            None => self.adamw_run::<G, f32>(args, None),
            Some(weight) => by_float!(weight, W => self.adamw_run::<G, W>(args, Some(self.shared(weight)))),
        });
        Ok(())
    }

    fn adamw_run<G: Float, W: Float>(&self, args: &AdamW, weight: Option<Shared<W>>) {
        let scalars = self.read::<f32>(args.scalars);
        // A skipped step leaves the state as it is, but the weight may never have been written before.
        let step = (scalars[ScalarSlot::Skip as usize] != 1.0).then(|| AdamStep::new(args, scalars));
        let grad = self.read::<G>(args.grad);
        let [master, m, v] = [args.master, args.m, args.v].map(|view| self.shared::<f32>(view));
        self.pieces(args.master.len, super::GRAIN, |piece| {
            let mut wide = [0.0; BLOCK];
            for start in piece.clone().step_by(BLOCK) {
                let r = start..(start + BLOCK).min(piece.end);
                let (grad, wide) = (&grad[r.clone()], &mut wide[..r.len()]);
                let master = master.part(r.clone());
                if let Some(step) = step {
                    adam(step, G::wide(grad, wide), master, m.part(r.clone()), v.part(r.clone()));
                }
                if let Some(weight) = &weight {
                    W::store(master, weight.part(r));
                }
            }
        });
    }
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

#[derive(Clone, Copy)]
struct AdamStep {
    factor: f32,
    lr: f32,
    c1: f32,
    c2: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
}

impl AdamStep {
    fn new(args: &AdamW, scalars: &[f32]) -> Self {
        let slot = |s: ScalarSlot| scalars[s as usize];
        Self {
            factor: slot(ScalarSlot::GradFactor),
            lr: slot(ScalarSlot::LearningRate),
            c1: slot(ScalarSlot::BiasCorrection1),
            c2: slot(ScalarSlot::BiasCorrection2Sqrt),
            beta1: args.beta1,
            beta2: args.beta2,
            eps: args.eps,
            decay: args.weight_decay,
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn adam(s: AdamStep, grad: &[f32], master: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let (rest1, rest2) = (1.0 - s.beta1, 1.0 - s.beta2);
    for (((w, m), v), g) in master.iter_mut().zip(m).zip(v).zip(grad) {
        let g = *g * s.factor;
        *m = s.beta1 * *m + rest1 * g;
        *v = s.beta2 * *v + rest2 * (g * g);
        let update = (*m / s.c1) / (v.sqrt() / s.c2 + s.eps);
        *w -= s.lr * (update + s.decay * *w);
    }
}
