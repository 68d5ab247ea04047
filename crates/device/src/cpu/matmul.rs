//! Matrix products through the `gemm` crate, cut into pieces of rows or columns. The cut depends on sizes only and never splits
//! the summed dimension, so results do not depend on the number of threads.

use std::ops::Range;

use gpurun_types::{DType, View};

use super::element::{Float, by_float};
use super::{CpuBackend, Result, Shared, float, is, kernels, length, shape};
use crate::Matmul;

const OP: &str = "matmul";

/// A row-major fp32 matrix, perhaps read transposed.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub pointer: *const f32,
    pub row: isize,
    pub column: isize,
}

// SAFETY: an operand is only ever read, and is used while the slice it was made from is borrowed.
unsafe impl Send for Operand {}
// SAFETY: as above.
unsafe impl Sync for Operand {}

impl Operand {
    pub(super) fn new(slice: &[f32], width: usize, transposed: bool) -> Self {
        let (row, column) = if transposed { (1, width as isize) } else { (width as isize, 1) };
        Self { pointer: slice.as_ptr(), row, column }
    }

    /// The rest of the matrix from a row and a column on, which lie within it.
    fn offset(self, row: usize, column: usize) -> Self {
        let elements = row as isize * self.row + column as isize * self.column;
        Self { pointer: self.pointer.wrapping_offset(elements), ..self }
    }
}

/// `d = (accumulate ? d : 0) + a b` on this thread; `d` is row-major with `stride` elements from row to row.
///
/// # Safety
/// `d` spans `(m - 1) * stride + n` elements; `a` and `b` span their `[m, k]` and `[k, n]`.
pub(super) unsafe fn product(
    [m, n, k]: [usize; 3],
    a: Operand,
    b: Operand,
    d: *mut f32,
    stride: usize,
    accumulate: bool,
) {
    let (stride, none) = (stride as isize, gemm::Parallelism::None);
    let (a, a_row, a_column) = (a.pointer, a.row, a.column);
    let (b, b_row, b_column) = (b.pointer, b.row, b.column);
    // SAFETY: the caller vouches for the spans; strides are those of the matrices.
    unsafe {
        gemm::gemm(
            m, n, k, d, 1, stride, accumulate, a, a_column, a_row, b, b_column, b_row, 1.0, 1.0, false, false, false,
            none,
        );
    }
}

/// What a product is added to, besides fp32 that it accumulates onto.
struct Start<'a, T> {
    bias: Option<&'a [f32]>,
    added: Option<Shared<T>>,
}

impl<T: Float> Start<'_, T> {
    fn is_something(&self) -> bool {
        self.bias.is_some() || self.added.is_some()
    }

    /// Fills one row of a piece: `columns` of the matrix, from element `at` of it on.
    fn row(&self, at: usize, columns: Range<usize>, to: &mut [f32]) {
        match (&self.added, self.bias) {
            (None, None) => {}
            (None, Some(bias)) => to.copy_from_slice(&bias[columns]),
            (Some(added), bias) => {
                T::load(added.get(at..at + columns.len()), to);
                if let Some(bias) = bias {
                    kernels::add(&bias[columns], to);
                }
            }
        }
    }
}

/// Multiply-adds that are worth a piece of their own.
const PIECE: usize = 1 << 21;

/// Rows and columns of the pieces that a product is cut into: at most eight, by sizes only.
///
/// Cutting `d` by rows makes every piece pack all of a transposed `b`, and cutting by columns all of a transposed `a`; what
/// is not transposed is used where it lies. So the cut goes where nothing, or little beside the product, is packed twice; and
/// along the longer side of a weight gradient, so that a piece's part of `b` stays in the cache.
fn piece_size(args: &Matmul) -> [usize; 2] {
    let Matmul { m, n, k, transpose_b, .. } = *args;
    let most = (m * n * k / PIECE).clamp(1, 8);
    // Powers of two, so that two and four threads are evenly busy. Rows and columns in whole tiles of the inner kernel.
    let cut = |total: usize, least: usize, tile: usize| {
        let count = (total / least).clamp(1, most);
        total.div_ceil(1 << count.ilog2()).next_multiple_of(tile)
    };
    if transpose_b && n >= 512 || !transpose_b && args.transpose_a && n > m {
        [m, cut(n, 128, 64)]
    } else {
        [cut(m, if transpose_b { 1024 } else { 64 }, 6), n]
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
        let bias = args.bias.map(|bias| by_float!(bias, T => self.wide::<T>(bias)));
        by_float!(d, T => self.product_pieces::<T>(args, [left, right], bias.as_deref()));
        Ok(())
    }

    fn product_pieces<T: Float>(&self, args: &Matmul, [a, b]: [Operand; 2], bias: Option<&[f32]>) {
        let Matmul { m, n, k, .. } = *args;
        let [rows, columns] = piece_size(args);
        let across = n.div_ceil(columns);
        let d = self.shared::<T>(args.d);
        // fp32 accumulates where it lies.
        let direct = T::DTYPE == DType::F32;
        let added = args.residual.or((args.accumulate && !direct).then_some(args.d)).map(|view| self.shared::<T>(view));
        let start = Start { bias, added };
        self.pieces(m.div_ceil(rows) * across, 1, |piece| {
            let (i, j) = (piece.start / across * rows, piece.start % across * columns);
            let (r, c) = (i..(i + rows).min(m), j..(j + columns).min(n));
            let (size, a, b) = ([r.len(), c.len(), k], a.offset(i, 0), b.offset(0, j));
            let mut narrow = (!direct).then(|| self.borrow(r.len() * c.len()));
            let (to, stride) = match &mut narrow {
                None => (Shared(d.0.cast::<f32>(), m * n).from(i * n + j), n),
                Some(spare) => (Shared::new(&mut spare.buffer), c.len()),
            };
            if start.is_something() {
                for (line, row) in r.clone().enumerate() {
                    start.row(row * n + j, c.clone(), to.part(line * stride..line * stride + c.len()));
                }
            }
            // SAFETY: lengths were checked by `matmul_op`; pieces write disjoint blocks of `d`, or buffers of their own.
            unsafe { product(size, a, b, to.0, stride, args.accumulate || start.is_something()) };
            if !direct {
                for (line, row) in r.enumerate() {
                    T::store(to.get(line * stride..(line + 1) * stride), d.part(row * n + c.start..row * n + c.end));
                }
            }
        });
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
