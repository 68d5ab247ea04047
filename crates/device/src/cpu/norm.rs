//! Layer norm and RMS norm.

use std::ops::Range;

use gpurun_types::{Bytes, DType, View};

use super::element::{Float, by_float};
use super::matmul::rows_per_partial;
use super::{CpuBackend, Result, float, is, kernels, length, norm_kernels, shape};
use crate::{NormBackward, NormForward, NormKind};

/// Elements of rows that are worked on at a time: they stay in the first-level cache.
const BLOCK: usize = 2048;

/// Two rows of sums for each piece of rows.
pub(super) fn scratch(rows: usize, width: usize) -> Bytes {
    DType::F32.bytes(rows.div_ceil(rows_per_partial(rows)) * 2 * width)
}

/// Blocks of whole rows.
fn blocks(rows: Range<usize>, width: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (BLOCK / width).max(1);
    rows.clone().step_by(step).map(move |start| start..(start + step).min(rows.end))
}

/// Scratch, whatever it is said to hold, as fp32.
fn sums_of(scratch: View) -> View {
    View { len: scratch.bytes() as usize / DType::F32.size(), dtype: DType::F32, ..scratch }
}

fn check_stats(op: &'static str, kind: NormKind, mean: Option<View>, rstd: View, rows: usize) -> Result {
    is(op, "rstd", rstd, DType::F32, rows)?;
    match (kind, mean) {
        (NormKind::Layer, Some(mean)) => is(op, "mean", mean, DType::F32, rows),
        (NormKind::Rms, None) => Ok(()),
        (NormKind::Layer, None) => Err(shape(op, "layer norm needs mean")),
        (NormKind::Rms, Some(_)) => Err(shape(op, "RMS norm has no mean")),
    }
}

impl CpuBackend {
    pub(super) fn norm_forward_op(&self, args: &NormForward) -> Result {
        const OP: &str = "norm_forward";
        let NormForward { x, rows, width, .. } = *args;
        float(OP, "x", x)?;
        length(OP, "x", x, rows * width)?;
        is(OP, "y", args.y, x.dtype, rows * width)?;
        is(OP, "weight", args.weight, x.dtype, width)?;
        check_stats(OP, args.kind, args.mean, args.rstd, rows)?;
        match (args.residual, args.sum) {
            (Some(residual), Some(sum)) => {
                is(OP, "residual", residual, x.dtype, rows * width)?;
                is(OP, "sum", sum, x.dtype, rows * width)?;
            }
            (None, None) => {}
            _ => return Err(shape(OP, "residual and sum go together")),
        }
        match (args.kind, args.bias) {
            (NormKind::Layer, Some(bias)) => is(OP, "bias", bias, x.dtype, width)?,
            (NormKind::Rms, Some(_)) => return Err(shape(OP, "RMS norm has no bias")),
            (_, None) => {}
        }
        if width == 0 {
            return Err(shape(OP, "rows of no elements"));
        }
        by_float!(x, T => self.norm_forward_rows::<T>(args));
        Ok(())
    }

    fn norm_forward_rows<T: Float>(&self, args: &NormForward) {
        let width = args.width;
        let weight = self.wide::<T>(args.weight);
        let bias = args.bias.map(|b| self.wide::<T>(b));
        let rstd = self.shared::<f32>(args.rstd);
        let mean = args.mean.map(|m| self.shared::<f32>(m));
        let y = self.shared::<T>(args.y);
        let sum = args.sum.map(|s| self.shared::<T>(s));
        let (x, residual) = (self.read::<T>(args.x), args.residual.map(|r| self.read::<T>(r)));
        self.rows(args.rows, width, |rows| {
            let room = (BLOCK / width).max(1) * width;
            let (mut wide, mut out, mut total) = (vec![0.0; room], vec![0.0; room], vec![0.0; room]);
            for r in blocks(rows, width) {
                let at = r.start * width..r.end * width;
                if let (Some(residual), Some(sum)) = (residual, &sum) {
                    let (x, residual) = (T::wide(&x[at.clone()], &mut wide), T::wide(&residual[at.clone()], &mut out));
                    T::write(sum.part(at.clone()), &mut total, |sum| norm_kernels::add(x, residual, sum));
                }
                // What later readers see is the rounded sum; statistics are taken of that.
                let x = sum.as_ref().map_or(&x[at.clone()], |sum| sum.get(at.clone()));
                let x = T::wide(x, &mut wide);
                let statistics = norm_kernels::Statistics {
                    mean: mean.as_ref().map(|mean| mean.part(r.clone())),
                    rstd: rstd.part(r.clone()),
                    eps: args.eps,
                };
                T::write(y.part(at), &mut out, |y| norm_kernels::forward(x, &weight, bias.as_deref(), y, statistics));
            }
        });
    }

    /// A small view as fp32.
    pub(super) fn wide<T: Float>(&self, view: View) -> Vec<f32> {
        let mut out = vec![0.0; view.len];
        T::load(self.read::<T>(view), &mut out);
        out
    }

    pub(super) fn norm_backward_op(&self, args: &NormBackward) -> Result {
        const OP: &str = "norm_backward";
        let NormBackward { x, rows, width, .. } = *args;
        float(OP, "x", x)?;
        length(OP, "x", x, rows * width)?;
        for (name, view) in [("dy", Some(args.dy)), ("dx", Some(args.dx)), ("carry", args.carry)] {
            if let Some(view) = view {
                is(OP, name, view, x.dtype, rows * width)?;
            }
        }
        is(OP, "weight", args.weight, x.dtype, width)?;
        is(OP, "dweight", args.dweight, DType::F32, width)?;
        check_stats(OP, args.kind, args.mean, args.rstd, rows)?;
        if let Some(dbias) = args.dbias {
            if args.kind == NormKind::Rms {
                return Err(shape(OP, "RMS norm has no bias"));
            }
            is(OP, "dbias", dbias, DType::F32, width)?;
        }
        if width == 0 {
            return Err(shape(OP, "rows of no elements"));
        }
        if args.scratch.bytes() < scratch(rows, width).0 {
            let needed = scratch(rows, width);
            return Err(shape(OP, format!("scratch has {} bytes, {needed} are needed", args.scratch.bytes())));
        }
        self.check(OP, [sums_of(args.scratch)])?;
        by_float!(x, T => self.norm_backward_rows::<T>(args));
        Ok(())
    }

    fn norm_backward_rows<T: Float>(&self, args: &NormBackward) {
        let (rows, width) = (args.rows, args.width);
        let grain = rows_per_partial(rows);
        let weight = self.wide::<T>(args.weight);
        let rstd = self.read::<f32>(args.rstd);
        let mean = args.mean.map(|m| self.read::<f32>(m));
        let partials = self.shared::<f32>(sums_of(args.scratch));
        // `dx` may be `dy` or `carry`: each row is read before it is written.
        let (x, dy, dx) = (self.read::<T>(args.x), self.shared::<T>(args.dy), self.shared::<T>(args.dx));
        let carry = args.carry.map(|carry| self.shared::<T>(carry));
        self.pieces(rows, grain, |piece| {
            let at = piece.start / grain * 2 * width;
            let (dweight, dbias) = (partials.part(at..at + width), partials.part(at + width..at + 2 * width));
            dweight.fill(0.0);
            dbias.fill(0.0);
            let room = (BLOCK / width).max(1) * width;
            let (mut wide, mut grad, mut other) = (vec![0.0; room], vec![0.0; room], vec![0.0; room]);
            for r in blocks(piece, width) {
                let at = r.start * width..r.end * width;
                let grad = &mut grad[..at.len()];
                T::load(dy.get(at.clone()), grad);
                let rows = norm_kernels::Rows {
                    x: T::wide(&x[at.clone()], &mut wide),
                    weight: &weight,
                    mean: mean.map(|mean| &mean[r.clone()]),
                    rstd: &rstd[r.clone()],
                };
                norm_kernels::backward(rows, grad, dweight, dbias);
                if let Some(carry) = &carry {
                    kernels::add(T::wide(carry.get(at.clone()), &mut other), grad);
                }
                T::store(grad, dx.part(at));
            }
        });
        for (offset, grad) in [(0, Some(args.dweight)), (width, args.dbias)] {
            let Some(grad) = grad.map(|g| self.write::<f32>(g)) else { continue };
            for piece in 0..rows.div_ceil(grain) {
                let at = piece * 2 * width + offset;
                kernels::add(partials.get(at..at + width), grad);
            }
        }
    }
}
