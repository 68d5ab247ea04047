//! Causal attention within packed documents.

use gpurun_types::{DType, Lane};

use super::check::{float, is, length, shape};
use super::driver::{Arguments, Launch, arguments};
use super::{CudaBackend, CudaSizes, KernelSource, KernelUnit, Result, element, flash};
use crate::{Attention, AttentionBackward, AttentionShape, ScratchSizes};

/// Queries and keys of a tile.
const TILE: usize = 32;
/// Largest number of elements per head.
const LARGEST: usize = 128;

fn check(op: &'static str, a: &Attention) -> Result {
    let AttentionShape { batch, seq, heads, kv_heads, head_dim } = a.shape;
    float(op, "qkv", a.qkv)?;
    length(op, "qkv", a.qkv, batch * seq * a.shape.packed_width())?;
    is(op, "starts", a.starts, DType::I32, batch * seq)?;
    is(op, "out", a.out, a.qkv.dtype, batch * seq * heads * head_dim)?;
    is(op, "lse", a.lse, DType::F32, batch * heads * seq)?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(shape(op, format!("{heads} heads, {kv_heads} key/value heads of {head_dim}")));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > LARGEST {
        return Err(shape(op, format!("heads of {head_dim}; they must be multiples of 8, at most {LARGEST}")));
    }
    let needed = CudaSizes.attention_scratch(a.shape, a.qkv.dtype);
    if a.scratch.bytes() < needed.0 {
        return Err(shape(op, format!("scratch has {} bytes, {needed} are needed", a.scratch.bytes())));
    }
    Ok(())
}

/// Bytes of shared memory for that many tiles.
fn shared(tiles: usize, head_dim: usize) -> usize {
    DType::F32.size() * tiles * TILE * (head_dim + 1)
}

impl CudaBackend {
    /// # Safety
    /// As for [`CudaBackend::launch`].
    unsafe fn launch_attention(
        &self,
        lane: Lane,
        a: &Attention,
        name: &'static str,
        launch: Launch,
        args: Arguments,
    ) -> Result {
        let (source, element) = (KernelSource::Attention, element(a.qkv.dtype));
        let function = self.function(KernelUnit { source, element, head_dim: a.shape.head_dim }, name)?;
        // SAFETY: the caller vouches for the arguments.
        unsafe { self.driver.launch(lane, function, launch, args) }
    }

    /// Adds the structure of sizes that the kernels take.
    fn shape_argument(a: &Attention, mut args: Arguments) -> Arguments {
        let AttentionShape { seq, heads, kv_heads, .. } = a.shape;
        let sizes = [seq, heads, kv_heads, a.shape.packed_width()].map(|n| (n as i32).to_ne_bytes());
        args.bytes(&[sizes.concat(), a.scale.to_ne_bytes().to_vec()].concat());
        args
    }

    fn grid(a: &Attention, heads: usize, tiles: usize) -> Launch {
        let AttentionShape { batch, seq, head_dim, .. } = a.shape;
        Launch { grid: [seq.div_ceil(TILE), heads, batch], block: [256, 1], shared: shared(tiles, head_dim) }
    }

    pub(super) fn attention_forward_op(&self, lane: Lane, a: &Attention) -> Result {
        const OP: &str = "attention_forward";
        check(OP, a)?;
        if self.cudnn_forward(lane, a)? {
            return Ok(());
        }
        if flash::takes(a.shape, a.qkv.dtype) {
            return self.flash_forward(lane, a);
        }
        let [qkv, starts, out, lse] = [a.qkv, a.starts, a.out, a.lse].map(|view| self.address(view));
        let list = Self::shape_argument(a, arguments![qkv, starts, out, lse]);
        // SAFETY: the kernel takes these; lengths were checked.
        unsafe { self.launch_attention(lane, a, OP, Self::grid(a, a.shape.heads, 3), list) }
    }

    pub(super) fn attention_backward_op(&self, lane: Lane, args: &AttentionBackward) -> Result {
        const OP: &str = "attention_backward";
        let a = &args.forward;
        check(OP, a)?;
        is(OP, "dout", args.dout, a.qkv.dtype, a.out.len)?;
        is(OP, "dqkv", args.dqkv, a.qkv.dtype, a.qkv.len)?;
        let deltas = self.address(a.scratch);
        if !deltas.is_multiple_of(4) {
            return Err(shape(OP, "scratch is not aligned to fp32"));
        }
        if self.cudnn_backward(lane, args)? {
            return Ok(());
        }
        if flash::takes(a.shape, a.qkv.dtype) {
            return self.flash_backward(lane, args);
        }
        let AttentionShape { batch, seq, heads, kv_heads, .. } = a.shape;
        let [qkv, starts, out, lse] = [a.qkv, a.starts, a.out, a.lse].map(|view| self.address(view));
        let [dout, dqkv] = [args.dout, args.dqkv].map(|view| self.address(view));
        let rows = batch * seq;
        let list = arguments![out, dout, deltas, rows, heads as i32, seq as i32];
        // SAFETY: the kernels take these; lengths were checked, and the scratch has room for the deltas.
        unsafe {
            self.launch_attention(lane, a, "attention_deltas", Launch::new((rows * heads).div_ceil(8), 256), list)?;
            let list = || Self::shape_argument(a, arguments![qkv, starts, lse, deltas, dout, dqkv]);
            self.launch_attention(lane, a, "attention_queries", Self::grid(a, heads, 4), list())?;
            self.launch_attention(lane, a, "attention_keys", Self::grid(a, kv_heads, 4), list())
        }
    }
}
