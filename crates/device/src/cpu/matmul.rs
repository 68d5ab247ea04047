//! Matrix products through the `gemm` crate. It never splits the summed dimension over threads, so results do not depend on
//! their number.

use gpurun_types::{DType, View};

use super::element::{Float, by_float};
use super::{CpuBackend, Result, Shared, float, is, kernels, length, shape};
use crate::Matmul;

const OP: &str = "matmul";

/// Below this many multiply-adds, threads cost more than they bring.
const SERIAL: usize = 64 * 64 * 64;

/// A row-major fp32 matrix, perhaps read transposed.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub pointer: *const f32,
    pub row: isize,
    pub column: isize,
}

// SAFETY: an operand is only ever read, and is used while the slice it was made from is borrowed.
unsafe impl Send for Operand {}

impl Operand {
    pub(super) fn new(slice: &[f32], width: usize, transposed: bool) -> Self {
        let (row, column) = if transposed { (1, width as isize) } else { (width as isize, 1) };
        Self { pointer: slice.as_ptr(), row, column }
    }
}

/// `d = (accumulate ? d : 0) + alpha * a b`; `d` is row-major with `stride` elements from row to row.
///
/// # Safety
/// `d` spans `(m - 1) * stride + n` elements; `a` and `b` span their `[m, k]` and `[k, n]`.
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn product(
    [m, n, k]: [usize; 3],
    a: Operand,
    b: Operand,
    alpha: f32,
    d: *mut f32,
    stride: usize,
    accumulate: bool,
    parallelism: gemm::Parallelism,
) {
    // SAFETY: the caller vouches for the spans; strides are those of the matrices.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            d,
            1,
            stride as isize,
            accumulate,
            a.pointer,
            a.column,
            a.row,
            b.pointer,
            b.column,
            b.row,
            1.0,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

impl CpuBackend {
    pub(super) fn matmul_op(&self, args: &Matmul) -> Result {
        let Matmul { a, b, d, m, n, k, .. } = *args;
        float(OP, "a", a)?;
        float(OP, "d", d)?;
        is(OP, "b", b, a.dtype, k * n)?;
        length(OP, "a", a, m * k)?;
        length(OP, "d", d, m * n)?;
        if d.dtype != a.dtype && d.dtype != DType::F32 {
            return Err(shape(OP, format!("d is {}, it must be {} or fp32", d.dtype, a.dtype)));
        }
        if let Some(bias) = args.bias {
            is(OP, "bias", bias, a.dtype, n)?;
        }
        if let Some(residual) = args.residual {
            is(OP, "residual", residual, d.dtype, m * n)?;
        }
        if args.accumulate && (args.bias.is_some() || args.residual.is_some()) {
            return Err(shape(OP, "accumulate goes with neither bias nor residual"));
        }
        if m * n == 0 {
            return Ok(());
        }
        let (mut wide_a, mut wide_b) = (self.wide_buffer(a), self.wide_buffer(b));
        let left = Operand::new(self.widened(a, &mut wide_a), if args.transpose_a { m } else { k }, args.transpose_a);
        let right = Operand::new(self.widened(b, &mut wide_b), if args.transpose_b { k } else { n }, args.transpose_b);
        let run = |out: &mut [f32], add: bool| {
            let serial = m * n * k <= SERIAL;
            let parallelism = if serial { gemm::Parallelism::None } else { self.parallelism() };
            let mut body = move || {
                let (left, right) = (left, right);
                // SAFETY: lengths were checked above.
                unsafe { product([m, n, k], left, right, 1.0, out.as_mut_ptr(), n, add, parallelism) };
            };
            match &self.pool {
                Some(pool) if !serial => pool.install(body),
                _ => body(),
            }
        };
        if d.dtype == DType::F32 {
            let out = self.write::<f32>(d);
            let start = self.start_values(args, out);
            run(out, start || args.accumulate);
        } else {
            let mut out = self.borrow(m * n);
            let out = &mut out.buffer[..m * n];
            if args.accumulate {
                by_float!(d, T => self.widen(self.read::<T>(d), out));
            }
            let start = self.start_values(args, out);
            run(out, start || args.accumulate);
            by_float!(d, T => self.narrow(out, self.write::<T>(d)));
        }
        Ok(())
    }

    /// Puts bias and residual where the product is to be added; false when there is neither.
    fn start_values(&self, args: &Matmul, out: &mut [f32]) -> bool {
        let n = args.n;
        if let Some(residual) = args.residual {
            by_float!(residual, T => self.widen(self.read::<T>(residual), out));
        }
        if let Some(bias) = args.bias {
            let mut row = vec![0.0; n];
            by_float!(bias, T => T::load(self.read::<T>(bias), &mut row));
            let shared = Shared::new(out);
            self.rows(args.m, n, |rows| {
                for i in rows {
                    let to = shared.part(i * n..(i + 1) * n);
                    if args.residual.is_some() { kernels::add(&row, to) } else { to.copy_from_slice(&row) }
                }
            });
        }
        args.bias.is_some() || args.residual.is_some()
    }

    fn wide_buffer(&self, view: View) -> Option<super::Spare<'_>> {
        (view.dtype != DType::F32).then(|| self.borrow(view.len))
    }

    /// A view as fp32: itself, or widened into the buffer.
    fn widened<'a>(&'a self, view: View, buffer: &'a mut Option<super::Spare<'_>>) -> &'a [f32] {
        match buffer {
            None => self.read::<f32>(view),
            Some(spare) => {
                let to = &mut spare.buffer[..view.len];
                by_float!(view, T => self.widen(self.read::<T>(view), to));
                to
            }
        }
    }

    /// Converts to fp32, in parallel.
    pub(super) fn widen<T: Float>(&self, src: &[T], dst: &mut [f32]) {
        let shared = Shared::new(dst);
        self.pieces(src.len(), super::GRAIN, |r| T::load(&src[r.clone()], shared.part(r)));
    }

    /// Converts from fp32, in parallel.
    pub(super) fn narrow<T: Float>(&self, src: &[f32], dst: &mut [T]) {
        let shared = Shared::new(dst);
        self.pieces(src.len(), super::GRAIN, |r| T::store(&src[r.clone()], shared.part(r)));
    }

    /// `grad[j] += sum_i dy[i, j]`. Pieces of rows are summed apart and added in order.
    pub(super) fn bias_grad_op(&self, dy: View, grad: View, rows: usize, columns: usize) -> Result {
        const OP: &str = "bias_grad";
        float(OP, "dy", dy)?;
        length(OP, "dy", dy, rows * columns)?;
        is(OP, "grad", grad, DType::F32, columns)?;
        by_float!(dy, T => {
            let dy = self.read::<T>(dy);
            self.sum_rows(rows, columns, self.write::<f32>(grad), |i, sums, wide| {
                T::load(&dy[i * columns..(i + 1) * columns], wide);
                kernels::add(wide, sums);
            });
        });
        Ok(())
    }

    /// `total += sum over rows`, where `add(row, sums, scratch)` adds one row; `sums` and `scratch` have `width` elements.
    pub(super) fn sum_rows(
        &self,
        rows: usize,
        width: usize,
        total: &mut [f32],
        add: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        let grain = rows_per_partial(rows);
        let count = rows.div_ceil(grain);
        let mut partials = self.borrow(2 * count * width);
        let shared = Shared::new(&mut partials.buffer);
        self.pieces(rows, grain, |r| {
            let at = 2 * (r.start / grain) * width;
            let (sums, wide) = (shared.part(at..at + width), shared.part(at + width..at + 2 * width));
            sums.fill(0.0);
            r.for_each(|i| add(i, sums, wide));
        });
        for part in partials.buffer.chunks(2 * width.max(1)).take(count) {
            kernels::add(&part[..width], total);
        }
    }
}

/// Rows that are summed one after the other before partial sums are combined: at most 32 partial sums.
pub(super) fn rows_per_partial(rows: usize) -> usize {
    rows.div_ceil(32).max(16)
}
