//! Layer norm and RMS norm.

use gpurun_types::{DType, Lane, View};

use super::check::{float, is, length, shape};
use super::driver::{Launch, arguments};
use super::{CudaBackend, CudaSizes, KernelSource, Result};
use crate::{NormBackward, NormForward, NormKind, ScratchSizes};

const SOURCE: KernelSource = KernelSource::Norm;

/// Blocks of the backward kernel. Rows alone decide, so that sums have the same order on every device.
pub(super) fn blocks(rows: usize) -> usize {
    rows.min(512)
}

/// Threads for rows of that width: eight elements each where that many are enough to fill warps.
fn threads(width: usize) -> usize {
    width.div_ceil(8).next_multiple_of(32).clamp(32, 512)
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

impl CudaBackend {
    pub(super) fn norm_forward_op(&self, lane: Lane, args: &NormForward) -> Result {
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
        let [x_at, weight, y, rstd] = [x, args.weight, args.y, args.rstd].map(|view| self.address(view));
        let [residual, sum, bias, mean] =
            [args.residual, args.sum, args.bias, args.mean].map(|view| self.optional(view));
        let layer = args.kind == NormKind::Layer;
        let list = arguments![x_at, residual, sum, weight, bias, y, mean, rstd, width, args.eps, layer];
        // SAFETY: the kernel takes these; all lengths were checked.
        unsafe { self.launch(lane, (SOURCE, x.dtype, OP), Launch::new(rows, threads(width)), list) }
    }

    pub(super) fn norm_backward_op(&self, lane: Lane, args: &NormBackward) -> Result {
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
        let needed = CudaSizes.norm_backward_scratch(rows, width);
        if args.scratch.bytes() < needed.0 {
            return Err(shape(OP, format!("scratch has {} bytes, {needed} are needed", args.scratch.bytes())));
        }
        let scratch = self.address(args.scratch);
        if !scratch.is_multiple_of(4) {
            return Err(shape(OP, "scratch is not aligned to fp32"));
        }
        let sums = 2 * width * DType::F32.size();
        let shared = if sums <= self.driver.shared_memory - 1024 { sums } else { 0 };
        let [x_at, weight, rstd, dy, dx] = [x, args.weight, args.rstd, args.dy, args.dx].map(|v| self.address(v));
        let [mean, carry] = [args.mean, args.carry].map(|view| self.optional(view));
        let layer = args.kind == NormKind::Layer;
        let list = arguments![x_at, weight, mean, rstd, dy, carry, dx, scratch, rows, width, layer, shared > 0];
        let parts = blocks(rows);
        let launch = Launch { shared, ..Launch::new(parts, threads(width)) };
        // SAFETY: the kernel takes these; all lengths were checked.
        unsafe { self.launch(lane, (SOURCE, x.dtype, OP), launch, list)? };
        self.add_parts(lane, scratch, args.dweight, parts, 2 * width)?;
        match args.dbias {
            Some(dbias) => self.add_parts(lane, scratch + (sums / 2) as u64, dbias, parts, 2 * width),
            None => Ok(()),
        }
    }
}
