//! Layer norm and RMS norm.

use gpurun_types::{Bytes, DType, View};

use super::element::{Float, by_float};
use super::matmul::rows_per_partial;
use super::{CpuBackend, Result, Shared, float, is, kernels, length, shape};
use crate::{NormBackward, NormForward, NormKind};

/// Two rows of sums and one of scratch for each piece of rows.
pub(super) fn scratch(rows: usize, width: usize) -> Bytes {
    DType::F32.bytes(rows.div_ceil(rows_per_partial(rows)) * 4 * width)
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
        let rstd = Shared::new(self.write::<f32>(args.rstd));
        let mean = args.mean.map(|m| Shared::new(self.write::<f32>(m)));
        let y = Shared::new(self.write::<T>(args.y));
        let sum = args.sum.map(|s| Shared::new(self.write::<T>(s)));
        let (x, residual) = (self.read::<T>(args.x), args.residual.map(|r| self.read::<T>(r)));
        self.rows(args.rows, width, |rows| {
            let (mut row, mut out) = (vec![0.0; width], vec![0.0; width]);
            for i in rows {
                let at = i * width..(i + 1) * width;
                T::load(&x[at.clone()], &mut row);
                if let (Some(residual), Some(sum)) = (residual, &sum) {
                    T::load(&residual[at.clone()], &mut out);
                    kernels::add(&out, &mut row);
                    // What later readers see is the rounded sum; statistics are taken of that.
                    let stored = sum.part(at.clone());
                    T::store(&row, stored);
                    T::load(stored, &mut row);
                }
                let (m, variance) = match args.kind {
                    NormKind::Layer => {
                        let m = kernels::sum(&row) / width as f32;
                        (m, kernels::squares_about(&row, m) / width as f32)
                    }
                    NormKind::Rms => (0.0, kernels::dot(&row, &row) / width as f32),
                };
                let r = 1.0 / (variance + args.eps).sqrt();
                kernels::normalise(&row, m, r, &weight, &mut out);
                if let Some(bias) = &bias {
                    kernels::add(bias, &mut out);
                }
                T::store(&out, y.part(at));
                rstd.part(i..i + 1)[0] = r;
                if let Some(mean) = &mean {
                    mean.part(i..i + 1)[0] = m;
                }
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
        if args.scratch.bytes() < scratch(rows, width).0 {
            let needed = scratch(rows, width);
            return Err(shape(OP, format!("scratch has {} bytes, {needed} are needed", args.scratch.bytes())));
        }
        by_float!(x, T => self.norm_backward_rows::<T>(args));
        Ok(())
    }

    fn norm_backward_rows<T: Float>(&self, args: &NormBackward) {
        let (rows, width) = (args.rows, args.width);
        let grain = rows_per_partial(rows);
        let weight = self.wide::<T>(args.weight);
        let rstd = self.read::<f32>(args.rstd);
        let mean = args.mean.map(|m| self.read::<f32>(m));
        let partials = self.write::<f32>(args.scratch.cast(DType::F32));
        let shared = Shared::new(partials);
        // `dx` may be `dy` or `carry`: rows are read before they are written, through one kind of access.
        let dx = Shared::new(self.write::<T>(args.dx));
        let row_of = |view: View, i: usize, out: &mut [f32]| {
            T::load(&self.read::<T>(view.slice(i * width, width))[..], out);
        };
        self.pieces(rows, grain, |piece| {
            let at = piece.start / grain * 4 * width;
            let (dweight, dbias) = (shared.part(at..at + width), shared.part(at + width..at + 2 * width));
            let (row, dy) = (shared.part(at + 2 * width..at + 3 * width), shared.part(at + 3 * width..at + 4 * width));
            dweight.fill(0.0);
            dbias.fill(0.0);
            for i in piece {
                row_of(args.x, i, row);
                row_of(args.dy, i, dy);
                let (m, r) = (mean.map_or(0.0, |m| m[i]), rstd[i]);
                let (plain, weighted) = kernels::norm_sums(row, m, r, &weight, dy);
                let a = if args.kind == NormKind::Layer { plain / width as f32 } else { 0.0 };
                kernels::add(dy, dbias);
                kernels::norm_grad(row, m, r, &weight, dy, a, weighted / width as f32, dweight);
                if let Some(carry) = args.carry {
                    row_of(carry, i, row);
                    kernels::add(row, dy);
                }
                T::store(dy, dx.part(i * width..(i + 1) * width));
            }
        });
        let (dweight, dbias) = (self.write::<f32>(args.dweight), args.dbias.map(|b| self.write::<f32>(b)));
        let mut dbias = dbias;
        for part in partials.chunks(4 * width).take(rows.div_ceil(grain)) {
            kernels::add(&part[..width], dweight);
            if let Some(dbias) = &mut dbias {
                kernels::add(&part[width..2 * width], dbias);
            }
        }
    }
}
