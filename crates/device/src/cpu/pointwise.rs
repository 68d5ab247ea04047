//! Element by element: fill, copy, cast, add, gelu, swiglu.

use gpurun_types::{DType, View};

use super::element::{Float, Stored, by_float};
use super::{CpuBackend, GRAIN, Result, Shared, float, is, kernels, length, shape};

/// Elements worked on at a time in fp32: stays in the first-level cache.
const BLOCK: usize = 1024;

impl CpuBackend {
    /// The bytes of a view.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn bytes_of(&self, view: View) -> &mut [u8] {
        // SAFETY: as for `write`; any bytes are bytes.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(view), view.bytes() as usize) }
    }

    pub(super) fn fill_op(&self, dst: View, value: f32) -> Result {
        fn all<T: Stored>(backend: &CpuBackend, dst: View, value: T) {
            let shared = backend.shared::<T>(dst);
            backend.pieces(dst.len, GRAIN, |r| shared.part(r).fill(value));
        }
        match dst.dtype {
            DType::F32 => all(self, dst, value),
            DType::Bf16 => all(self, dst, half::bf16::from_f32(value)),
            DType::F16 => all(self, dst, half::f16::from_f32(value)),
            DType::F64 => all(self, dst, f64::from(value)),
            DType::I32 => all(self, dst, value as i32),
        }
        Ok(())
    }

    pub(super) fn copy_op(&self, src: View, dst: View) -> Result {
        is("copy", "dst", dst, src.dtype, src.len)?;
        if src == dst {
            return Ok(());
        }
        if src.arena == dst.arena && src.offset < dst.offset + dst.bytes() && dst.offset < src.offset + src.bytes() {
            return Err(shape("copy", "src and dst overlap"));
        }
        let (from, to) = (&*self.bytes_of(src), self.bytes_of(dst));
        let to = Shared::new(to);
        self.pieces(from.len(), 1 << 20, |r| to.part(r.clone()).copy_from_slice(&from[r]));
        Ok(())
    }

    pub(super) fn cast_op(&self, src: View, dst: View) -> Result {
        const OP: &str = "cast";
        float(OP, "src", src)?;
        float(OP, "dst", dst)?;
        length(OP, "dst", dst, src.len)?;
        by_float!(src, S => by_float!(dst, D => {
            let from = self.read::<S>(src);
            let to = self.shared::<D>(dst);
            self.blocks(from.len(), |r, wide, _| {
                S::load(&from[r.clone()], wide);
                D::store(wide, to.part(r));
            });
        }));
        Ok(())
    }

    /// Runs `body(range, a, b)` over blocks of `0..len`, with two fp32 buffers of the block's length.
    fn blocks(&self, len: usize, body: impl Fn(std::ops::Range<usize>, &mut [f32], &mut [f32]) + Sync) {
        self.pieces(len, GRAIN, |piece| {
            let (mut a, mut b) = ([0.0; BLOCK], [0.0; BLOCK]);
            let mut start = piece.start;
            while start < piece.end {
                let end = (start + BLOCK).min(piece.end);
                let n = end - start;
                body(start..end, &mut a[..n], &mut b[..n]);
                start = end;
            }
        });
    }

    pub(super) fn add_assign_op(&self, src: View, dst: View) -> Result {
        const OP: &str = "add_assign";
        float(OP, "src", src)?;
        is(OP, "dst", dst, src.dtype, src.len)?;
        by_float!(src, T => {
            let from = self.read::<T>(src);
            let to = self.shared::<T>(dst);
            self.blocks(from.len(), |r, a, b| {
                let from = T::wide(&from[r.clone()], a);
                T::update(to.part(r), b, |to| kernels::add(from, to));
            });
        });
        Ok(())
    }

    pub(super) fn gelu_forward_op(&self, x: View, y: View) -> Result {
        const OP: &str = "gelu_forward";
        float(OP, "x", x)?;
        is(OP, "y", y, x.dtype, x.len)?;
        by_float!(x, T => {
            let (from, to) = (self.read::<T>(x), self.shared::<T>(y));
            self.blocks(x.len, |r, a, b| {
                let from = T::wide(&from[r.clone()], a);
                T::write(to.part(r), b, |to| kernels::gelu(from, to));
            });
        });
        Ok(())
    }

    pub(super) fn gelu_backward_op(&self, x: View, dy: View, dx: View) -> Result {
        const OP: &str = "gelu_backward";
        float(OP, "x", x)?;
        is(OP, "dy", dy, x.dtype, x.len)?;
        is(OP, "dx", dx, x.dtype, x.len)?;
        by_float!(x, T => {
            let (x, grad, out) = (self.read::<T>(x), self.shared::<T>(dy), self.shared::<T>(dx));
            self.blocks(x.len(), |r, a, b| {
                let x = T::wide(&x[r.clone()], a);
                if dx == dy {
                    T::update(out.part(r), b, |grad| kernels::gelu_grad_over(x, grad));
                } else {
                    let mut wide = [0.0; BLOCK];
                    let dy = T::wide(grad.get(r.clone()), &mut wide);
                    T::write(out.part(r), b, |dx| kernels::gelu_grad(x, dy, dx));
                }
            });
        });
        Ok(())
    }

    pub(super) fn swiglu_forward_op(&self, x: View, y: View, rows: usize, width: usize) -> Result {
        const OP: &str = "swiglu_forward";
        float(OP, "x", x)?;
        length(OP, "x", x, 2 * rows * width)?;
        is(OP, "y", y, x.dtype, rows * width)?;
        by_float!(x, T => {
            let from = self.read::<T>(x);
            let to = self.shared::<T>(y);
            self.rows(rows, 2 * width, |rows| {
                let (mut wide, mut out) = (vec![0.0; 2 * width], vec![0.0; width]);
                for i in rows {
                    let (gate, up) = T::wide(&from[2 * i * width..2 * (i + 1) * width], &mut wide).split_at(width);
                    T::write(to.part(i * width..(i + 1) * width), &mut out, |y| kernels::swiglu(gate, up, y));
                }
            });
        });
        Ok(())
    }

    pub(super) fn swiglu_backward_op(&self, x: View, dy: View, dx: View, rows: usize, width: usize) -> Result {
        const OP: &str = "swiglu_backward";
        float(OP, "x", x)?;
        length(OP, "x", x, 2 * rows * width)?;
        is(OP, "dx", dx, x.dtype, 2 * rows * width)?;
        is(OP, "dy", dy, x.dtype, rows * width)?;
        by_float!(x, T => {
            // `dx` may be `x`: each row is read before it is written.
            let (x, dy, dx) = (self.shared::<T>(x), self.read::<T>(dy), self.shared::<T>(dx));
            self.rows(rows, 2 * width, |rows| {
                let (mut wide, mut grad) = (vec![0.0; 2 * width], vec![0.0; width]);
                for i in rows {
                    T::load(x.get(2 * i * width..2 * (i + 1) * width), &mut wide);
                    T::load(&dy[i * width..(i + 1) * width], &mut grad);
                    let (gate, up) = wide.split_at_mut(width);
                    kernels::swiglu_grad(gate, up, &grad);
                    T::store(&wide, dx.part(2 * i * width..2 * (i + 1) * width));
                }
            });
        });
        Ok(())
    }
}
