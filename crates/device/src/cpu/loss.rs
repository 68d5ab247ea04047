//! Cross-entropy.

use gpurun_types::DType;

use super::element::{Float, by_float};
use super::{CpuBackend, Result, float, is, kernels, length};
use crate::{CrossEntropy, DeviceError};

impl CpuBackend {
    pub(super) fn cross_entropy_op(&self, args: &CrossEntropy) -> Result {
        const OP: &str = "cross_entropy";
        let CrossEntropy { rows, vocabulary, .. } = *args;
        float(OP, "logits", args.logits)?;
        length(OP, "logits", args.logits, rows * vocabulary)?;
        is(OP, "targets", args.targets, DType::I32, rows)?;
        is(OP, "loss", args.loss, DType::F64, 1)?;
        is(OP, "row_losses", args.row_losses, DType::F32, rows)?;
        is(OP, "scale", args.scale, DType::F32, 1)?;
        let targets = self.read::<i32>(args.targets);
        if let Some(at) = targets.iter().position(|t| *t >= 0 && *t as usize >= vocabulary) {
            let reason = format!("target {} of row {at} is not below {vocabulary}", targets[at]);
            return Err(DeviceError::Failed { operation: OP.to_owned(), reason });
        }
        by_float!(args.logits, T => self.cross_entropy_rows::<T>(args, targets));
        Ok(())
    }

    fn cross_entropy_rows<T: Float>(&self, args: &CrossEntropy, targets: &[i32]) {
        let vocabulary = args.vocabulary;
        let factor = args.factor * self.read::<f32>(args.scale)[0];
        let losses = self.shared::<f32>(args.row_losses);
        let logits = self.shared::<T>(args.logits);
        self.rows(args.rows, vocabulary, |rows| {
            let mut wide = vec![0.0; vocabulary];
            for i in rows {
                let row = logits.part(i * vocabulary..(i + 1) * vocabulary);
                let loss = &mut losses.part(i..i + 1)[0];
                *loss = 0.0;
                let Ok(target) = usize::try_from(targets[i]) else {
                    if args.backward {
                        wide.fill(0.0);
                        T::store(&wide, row);
                    }
                    continue;
                };
                T::load(row, &mut wide);
                let highest = kernels::max(&wide);
                let at_target = wide[target];
                let sum = kernels::exp_sum(&mut wide, 1.0, highest);
                *loss = sum.ln() + highest - at_target;
                if args.backward {
                    kernels::scale(&mut wide, factor / sum);
                    wide[target] -= factor;
                    T::store(&wide, row);
                }
            }
        });
        let sum = losses.get(0..args.rows).iter().fold(0.0, |sum, loss| sum + f64::from(*loss));
        self.write::<f64>(args.loss)[0] += sum;
    }
}
