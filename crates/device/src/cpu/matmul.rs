//! Matrix products through the `gemm` crate, cut into pieces of rows or columns. The cut never splits the summed dimension, and
//! no piece is so small that the crate would sum in another order, so results do not depend on the number of threads.

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

/// Elements of `a` that a piece reads again for each panel of `b`: they stay in the second-level cache.
const CACHED: usize = 192 << 10;

/// One dimension of `d`, cut into even pieces.
#[derive(Clone, Copy)]
struct Cut {
    total: usize,
    tile: usize,
    count: usize,
}

impl Cut {
    /// At most `wanted` pieces of at least `least` elements, in whole tiles of the inner kernel but for the end of the last.
    ///
    /// `least` is above 64: the gemm crate sums smaller products in blocks of another length, and the sum of an element must
    /// not depend on the cut.
    fn new(total: usize, wanted: usize, least: usize, tile: usize) -> Self {
        Self { total, tile, count: wanted.min(total / least).max(1) }
    }

    fn piece(self, i: usize) -> Range<usize> {
        let bound = |i| if i == self.count { self.total } else { self.total / self.tile * i / self.count * self.tile };
        bound(i)..bound(i + 1)
    }
}

/// How rows and columns of `d` are cut between threads.
///
/// Cutting by rows makes every piece pack all of a transposed `b`, and cutting by columns all of a transposed `a`; what is not
/// transposed is used where it lies. So the cut goes where nothing is packed twice, in as few pieces as keep the threads busy;
/// where nothing is packed at all, in pieces whose rows of `a` stay in the cache.
fn cuts(args: &Matmul, threads: usize) -> [Cut; 2] {
    let Matmul { m, n, k, transpose_a, transpose_b, .. } = *args;
    let wanted = (m * n * k / PIECE).clamp(1, threads);
    let rows = |wanted| Cut::new(m, wanted, 96, 6);
    let columns = |wanted| Cut::new(n, wanted, 128, 64);
    match (transpose_a, transpose_b) {
        (true, true) | (false, true) => {
            let columns = columns(wanted);
            [rows(wanted.div_ceil(columns.count)), columns]
        }
        (true, false) => {
            let rows = rows(wanted);
            [rows, columns(wanted.div_ceil(rows.count))]
        }
        (false, false) => {
            let rows = rows((m * k / CACHED).next_multiple_of(wanted).max(wanted));
            [rows, columns(wanted.div_ceil(rows.count))]
        }
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
        let [rows, columns] = cuts(args, self.threads);
        let d = self.shared::<T>(args.d);
        // fp32 accumulates where it lies.
        let direct = T::DTYPE == DType::F32;
        let added = args.residual.or((args.accumulate && !direct).then_some(args.d)).map(|view| self.shared::<T>(view));
        let start = Start { bias, added };
        self.pieces(rows.count * columns.count, 1, |piece| {
            let (r, c) = (rows.piece(piece.start / columns.count), columns.piece(piece.start % columns.count));
            let (i, j) = (r.start, c.start);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_dimension_once_and_none_is_small() {
        let _limit = testkit::time_limit(30);
        for total in [1, 5, 95, 96, 191, 192, 257, 1000, 2048, 50_257] {
            for wanted in 1..40 {
                let cut = Cut::new(total, wanted, 96, 6);
                let pieces: Vec<_> = (0..cut.count).map(|i| cut.piece(i)).collect();
                assert!(pieces.iter().all(|piece| piece.len() >= 96 || cut.count == 1), "{total} {wanted}: {pieces:?}");
                assert_eq!((pieces[0].start, pieces[cut.count - 1].end), (0, total));
                assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start), "{total} {wanted}: {pieces:?}");
            }
        }
    }
}
