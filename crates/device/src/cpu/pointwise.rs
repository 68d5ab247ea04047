//! Element by element: fill, copy, cast, add, gelu, swiglu, rope.

use gpurun_types::{DType, View};

use super::element::{Float, Stored, by_float};
use super::{CpuBackend, GRAIN, Result, Shared, float, is, kernels, length, shape};
use crate::{Rope, RopeScaling};

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

    pub(super) fn rope_op(&self, args: &Rope) -> Result {
        const OP: &str = "rope";
        let Rope { x, rows, seq, heads, head_dim, stride, .. } = *args;
        float(OP, "x", x)?;
        length(OP, "x", x, rows * stride)?;
        is(OP, "starts", args.starts, DType::I32, rows)?;
        if !head_dim.is_multiple_of(2) || heads * head_dim > stride || seq == 0 || !rows.is_multiple_of(seq) {
            return Err(shape(OP, format!("{heads} heads of {head_dim} in rows of {stride}, {rows} rows of {seq}")));
        }
        let half = head_dim / 2;
        let (cos, sin) = angles(args);
        let starts = self.read::<i32>(args.starts);
        by_float!(x, T => {
            let shared = self.shared::<T>(x);
            self.rows(rows, heads * head_dim, |rows| {
                let mut wide = vec![0.0; heads * head_dim];
                for i in rows {
                    let position = (i % seq).saturating_sub(starts[i].max(0) as usize);
                    let at = position * half..(position + 1) * half;
                    let part = shared.part(i * stride..i * stride + heads * head_dim);
                    T::load(part, &mut wide);
                    for head in wide.chunks_exact_mut(head_dim) {
                        let (a, b) = head.split_at_mut(half);
                        kernels::rotate(a, b, &cos[at.clone()], &sin[at.clone()]);
                    }
                    T::store(&wide, part);
                }
            });
        });
        Ok(())
    }
}

/// Cosines and sines for every position of a sequence: `[seq, head_dim / 2]` each.
fn angles(args: &Rope) -> (Vec<f32>, Vec<f32>) {
    let half = args.head_dim / 2;
    let (mut cos, mut sin) = (Vec::with_capacity(args.seq * half), Vec::with_capacity(args.seq * half));
    let frequencies: Vec<f64> = (0..half)
        .map(|i| {
            let base = f64::from(args.theta).powf(-2.0 * i as f64 / args.head_dim as f64);
            args.scaling.map_or(base, |s| scaled(base, s))
        })
        .collect();
    let sign = if args.inverse { -1.0 } else { 1.0 };
    for position in 0..args.seq {
        for frequency in &frequencies {
            let (s, c) = (position as f64 * frequency).sin_cos();
            cos.push(c as f32);
            sin.push((s * sign) as f32);
        }
    }
    (cos, sin)
}

/// Llama 3.1's change of one frequency (Dubey et al. 2024).
fn scaled(frequency: f64, s: RopeScaling) -> f64 {
    let [factor, low, high, context] = [s.factor, s.low_frequency, s.high_frequency, s.original_context].map(f64::from);
    let wavelength = 2.0 * std::f64::consts::PI / frequency;
    if wavelength < context / high {
        return frequency;
    }
    if wavelength > context / low {
        return frequency / factor;
    }
    let smooth = (context / wavelength - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}
