//! Element by element: fill, copy, cast, add, gelu, swiglu, rope.

use cudarc::driver::sys;
use gpurun_types::{DType, Lane, Place, View};

use super::check::{float, is, length, shape};
use super::driver::{Launch, arguments, check};
use super::{CudaBackend, KernelSource, Result, element};
use crate::{Rope, RopeScaling};

/// Pairs of elements of a head that the rotary kernel has room for.
const PAIRS: usize = 256;

impl CudaBackend {
    pub(super) fn fill_op(&self, lane: Lane, dst: View, value: f32) -> Result {
        if dst.len == 0 {
            return Ok(());
        }
        let address = self.address(dst);
        if value.to_bits() == 0 && self.place(dst) == Place::Device {
            self.driver.enter()?;
            let stream = self.driver.stream(lane);
            // SAFETY: the view lies within its arena.
            let code = unsafe { sys::cuMemsetD8Async(address, 0, dst.bytes() as usize, stream) };
            return check("cuMemsetD8Async", code);
        }
        let (name, args) = match dst.dtype {
            DType::F32 => ("fill32", arguments![address, dst.len, value.to_bits()]),
            DType::I32 => ("fill32", arguments![address, dst.len, value as i32]),
            DType::Bf16 => ("fill16", arguments![address, dst.len, u32::from(half::bf16::from_f32(value).to_bits())]),
            DType::F16 => ("fill16", arguments![address, dst.len, u32::from(half::f16::from_f32(value).to_bits())]),
            DType::F64 => ("fill64", arguments![address, dst.len, f64::from(value)]),
        };
        // SAFETY: the kernels take an address, a length and a value, and stay within the view.
        unsafe { self.launch(lane, (KernelSource::Convert, DType::F32, name), Launch::over(dst.len), args) }
    }

    pub(super) fn copy_op(&self, lane: Lane, src: View, dst: View) -> Result {
        is("copy", "dst", dst, src.dtype, src.len)?;
        if src == dst || src.len == 0 {
            return Ok(());
        }
        if src.arena == dst.arena && src.offset < dst.offset + dst.bytes() && dst.offset < src.offset + src.bytes() {
            return Err(shape("copy", "src and dst overlap"));
        }
        self.driver.enter()?;
        let (from, to, stream) = (self.address(src), self.address(dst), self.driver.stream(lane));
        // SAFETY: both views lie within their arenas and have one length; the driver knows where each lies.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, src.bytes() as usize, stream) })
    }

    pub(super) fn cast_op(&self, lane: Lane, src: View, dst: View) -> Result {
        const OP: &str = "cast";
        float(OP, "src", src)?;
        float(OP, "dst", dst)?;
        length(OP, "dst", dst, src.len)?;
        let name = match (element(src.dtype), element(dst.dtype)) {
            ("float", "float") => "cast_float_float",
            ("float", "bf16") => "cast_float_bf16",
            ("float", _) => "cast_float_f16",
            ("bf16", "float") => "cast_bf16_float",
            ("bf16", "bf16") => "cast_bf16_bf16",
            ("bf16", _) => "cast_bf16_f16",
            (_, "float") => "cast_f16_float",
            (_, "bf16") => "cast_f16_bf16",
            _ => "cast_f16_f16",
        };
        let args = arguments![self.address(src), self.address(dst), src.len];
        self.over(lane, (KernelSource::Convert, DType::F32, name), src.len, 4, args)
    }

    /// A kernel over `len` elements of views that were checked, `each` of them to a thread.
    fn over(
        &self,
        lane: Lane,
        kernel: (KernelSource, DType, &'static str),
        len: usize,
        each: usize,
        args: super::Arguments,
    ) -> Result {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the callers in this file pass what their kernels take; these touch `len` elements of each view.
        unsafe { self.launch(lane, kernel, Launch::over(len.div_ceil(each)), args) }
    }

    pub(super) fn add_assign_op(&self, lane: Lane, src: View, dst: View) -> Result {
        const OP: &str = "add_assign";
        float(OP, "src", src)?;
        is(OP, "dst", dst, src.dtype, src.len)?;
        let args = arguments![self.address(src), self.address(dst), src.len];
        self.over(lane, (KernelSource::Pointwise, src.dtype, OP), src.len, 8, args)
    }

    pub(super) fn gelu_forward_op(&self, lane: Lane, x: View, y: View) -> Result {
        const OP: &str = "gelu_forward";
        float(OP, "x", x)?;
        is(OP, "y", y, x.dtype, x.len)?;
        let args = arguments![self.address(x), self.address(y), x.len];
        self.over(lane, (KernelSource::Pointwise, x.dtype, OP), x.len, 8, args)
    }

    pub(super) fn gelu_backward_op(&self, lane: Lane, x: View, dy: View, dx: View) -> Result {
        const OP: &str = "gelu_backward";
        float(OP, "x", x)?;
        is(OP, "dy", dy, x.dtype, x.len)?;
        is(OP, "dx", dx, x.dtype, x.len)?;
        let args = arguments![self.address(x), self.address(dy), self.address(dx), x.len];
        self.over(lane, (KernelSource::Pointwise, x.dtype, OP), x.len, 8, args)
    }

    /// Blocks for a kernel over rows of `width` elements, eight to a thread where they are aligned.
    fn over_rows(rows: usize, width: usize) -> Launch {
        let across = width.div_ceil(8 * 256).max(1);
        Launch { grid: [across, rows.min(65_535), 1], block: [256, 1], shared: 0 }
    }

    pub(super) fn swiglu_forward_op(&self, lane: Lane, x: View, y: View, rows: usize, width: usize) -> Result {
        const OP: &str = "swiglu_forward";
        float(OP, "x", x)?;
        length(OP, "x", x, 2 * rows * width)?;
        is(OP, "y", y, x.dtype, rows * width)?;
        let args = arguments![self.address(x), self.address(y), rows, width];
        // SAFETY: the kernel takes these and stays within views whose lengths were checked.
        unsafe { self.launch(lane, (KernelSource::Pointwise, x.dtype, OP), Self::over_rows(rows, width), args) }
    }

    pub(super) fn swiglu_backward_op(
        &self,
        lane: Lane,
        x: View,
        dy: View,
        dx: View,
        rows: usize,
        width: usize,
    ) -> Result {
        const OP: &str = "swiglu_backward";
        float(OP, "x", x)?;
        length(OP, "x", x, 2 * rows * width)?;
        is(OP, "dx", dx, x.dtype, 2 * rows * width)?;
        is(OP, "dy", dy, x.dtype, rows * width)?;
        let args = arguments![self.address(x), self.address(dy), self.address(dx), rows, width];
        // SAFETY: as in `swiglu_forward_op`.
        unsafe { self.launch(lane, (KernelSource::Pointwise, x.dtype, OP), Self::over_rows(rows, width), args) }
    }

    /// `d[i, j] += bias[j]`, of views that were checked.
    pub(super) fn bias_add(&self, lane: Lane, d: View, bias: View, rows: usize, columns: usize) -> Result {
        let name = if d.dtype == bias.dtype { "bias_add_same" } else { "bias_add_wide" };
        let args = arguments![self.address(d), self.address(bias), rows, columns];
        let launch = Launch { grid: [columns.div_ceil(256), rows.min(65_535), 1], block: [256, 1], shared: 0 };
        // SAFETY: as in `swiglu_forward_op`.
        unsafe { self.launch(lane, (KernelSource::Pointwise, bias.dtype, name), launch, args) }
    }

    pub(super) fn rope_op(&self, lane: Lane, args: &Rope) -> Result {
        const OP: &str = "rope";
        let Rope { x, rows, seq, heads, head_dim, stride, .. } = *args;
        float(OP, "x", x)?;
        length(OP, "x", x, rows * stride)?;
        is(OP, "starts", args.starts, DType::I32, rows)?;
        if !head_dim.is_multiple_of(2) || heads * head_dim > stride || seq == 0 || !rows.is_multiple_of(seq) {
            return Err(shape(OP, format!("{heads} heads of {head_dim} in rows of {stride}, {rows} rows of {seq}")));
        }
        if head_dim > 2 * PAIRS {
            return Err(shape(OP, format!("heads of {head_dim}; at most {} are supported", 2 * PAIRS)));
        }
        let mut frequencies = [0.0; PAIRS];
        for (pair, frequency) in frequencies.iter_mut().take(head_dim / 2).enumerate() {
            let base = f64::from(args.theta).powf(-2.0 * pair as f64 / head_dim as f64);
            *frequency = args.scaling.map_or(base, |s| scaled(base, s));
        }
        let (x_at, starts) = (self.address(x), self.address(args.starts));
        let list = arguments![x_at, starts, rows, seq, heads, head_dim, stride, args.inverse, frequencies[..]];
        self.over(lane, (KernelSource::Pointwise, x.dtype, OP), rows * head_dim / 2, 1, list)
    }
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
