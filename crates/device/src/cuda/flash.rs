//! Attention on the tensor cores: `kernels/flash.cu`, for bf16 and fp16.

use gpurun_types::{DType, Lane};

use super::compile::{Source, Unit};
use super::driver::{Arguments, Launch, arguments};
use super::{CudaBackend, Result, element};
use crate::{Attention, AttentionBackward, AttentionShape};

const WARPS: usize = 4;

/// Sizes of the tiles, as `flash.cu` derives them from the head dimension.
struct Tiles {
    /// Elements from one row of a tile to the next.
    stride: usize,
    /// Rows that a block of the forward owns, and keys it streams.
    forward: (usize, usize),
    /// Rows that a block of the gradient of queries owns, and keys it streams.
    queries: (usize, usize),
    /// Keys that a block of the gradient of keys owns, and queries it streams.
    keys: (usize, usize),
}

impl Tiles {
    fn new(head_dim: usize) -> Self {
        let padded = head_dim.next_multiple_of(16);
        let (double, streamed) = if padded <= 64 { (2, 64) } else { (1, 32) };
        let rows = 16 * WARPS;
        Self { stride: padded + 8, forward: (rows * double, 64), queries: (rows * double, 32), keys: (rows, streamed) }
    }

    /// Bytes of shared memory for `owned` rows and two stages of keys and values (or queries and gradients).
    fn shared(&self, owned: usize, streamed: usize) -> usize {
        (owned + 4 * streamed) * self.stride * DType::Bf16.size()
    }
}

/// Whether these kernels take such an attention.
pub(super) fn takes(shape: AttentionShape, dtype: DType) -> bool {
    matches!(dtype, DType::Bf16 | DType::F16)
        && shape.head_dim.is_multiple_of(8)
        && (8..=128).contains(&shape.head_dim)
        && shape.batch * shape.seq > 0
}

/// The kernels' `Shape`.
fn sizes(args: &mut Arguments, attention: &Attention, wide: bool) {
    let AttentionShape { batch, seq, heads, kv_heads, .. } = attention.shape;
    let mut bytes = Vec::with_capacity(24);
    for size in [batch, seq, heads, kv_heads] {
        bytes.extend_from_slice(&(size as i32).to_ne_bytes());
    }
    bytes.extend_from_slice(&attention.scale.to_ne_bytes());
    bytes.extend_from_slice(&i32::from(wide).to_ne_bytes());
    args.bytes(&bytes);
}

impl CudaBackend {
    /// Enqueues a kernel of `flash.cu`.
    ///
    /// # Safety
    /// As for [`super::driver::Driver::launch`].
    unsafe fn launch_flash(
        &self,
        lane: Lane,
        a: &Attention,
        name: &'static str,
        launch: Launch,
        args: Arguments,
    ) -> Result {
        let unit = Unit { source: Source::Flash, element: element(a.qkv.dtype), head_dim: a.shape.head_dim };
        let function = self.function(unit, name)?;
        // SAFETY: the caller vouches for the arguments.
        unsafe { self.driver.launch(lane, function, launch, args) }
    }

    /// Views have been checked, and [`takes`] has said yes.
    pub(super) fn flash_forward(&self, lane: Lane, a: &Attention) -> Result {
        let (tiles, s) = (Tiles::new(a.shape.head_dim), a.shape);
        let [qkv, starts, out, lse] = [a.qkv, a.starts, a.out, a.lse].map(|view| self.address(view));
        let mut args = arguments!(qkv, starts, out, lse);
        sizes(&mut args, a, (qkv | out).is_multiple_of(16));
        let (owned, streamed) = tiles.forward;
        let mut launch = Launch::new(s.seq.div_ceil(owned) * s.batch * s.heads, 32 * WARPS);
        launch.shared = tiles.shared(owned, streamed);
        // SAFETY: these are the kernel's arguments; rows and heads lie within the views, whose lengths were checked.
        unsafe { self.launch_flash(lane, a, "flash_forward", launch, args) }
    }

    /// Views have been checked, and [`takes`] has said yes. `forward.scratch` holds fp32 `[batch, heads, seq]`.
    pub(super) fn flash_backward(&self, lane: Lane, b: &AttentionBackward) -> Result {
        let (a, tiles, s) = (&b.forward, Tiles::new(b.forward.shape.head_dim), b.forward.shape);
        let [qkv, starts, out, lse] = [a.qkv, a.starts, a.out, a.lse].map(|view| self.address(view));
        let [dout, dqkv, deltas] = [b.dout, b.dqkv, a.scratch].map(|view| self.address(view));
        let wide = (qkv | dout | dqkv).is_multiple_of(16);
        let mut args = arguments!(out, dout, deltas);
        sizes(&mut args, a, wide);
        let launch = Launch::new((s.batch * s.seq * s.heads).div_ceil(8), 256);
        // SAFETY: as in `flash_forward`; the scratch has room for `deltas`.
        unsafe { self.launch_flash(lane, a, "flash_deltas", launch, args)? };
        let gradient = |name, blocks, shared| {
            let mut args = arguments!(qkv, starts, lse, deltas, dout, dqkv);
            sizes(&mut args, a, wide);
            let mut launch = Launch::new(blocks, 32 * WARPS);
            launch.shared = shared;
            // SAFETY: as above; the two kernels write apart: query heads, and key and value heads.
            unsafe { self.launch_flash(lane, a, name, launch, args) }
        };
        let (owned, streamed) = tiles.queries;
        let shared = tiles.shared(2 * owned, streamed);
        gradient("flash_queries", s.seq.div_ceil(owned) * s.batch * s.heads, shared)?;
        let (owned, streamed) = tiles.keys;
        let shared = tiles.shared(2 * owned, streamed);
        gradient("flash_keys", s.seq.div_ceil(owned) * s.batch * s.kv_heads, shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_shared_memory_of_every_supported_card() {
        let _limit = testkit::time_limit(10);
        for head_dim in (8..=128).step_by(8) {
            let tiles = Tiles::new(head_dim);
            let (forward, queries, keys) = (tiles.forward, tiles.queries, tiles.keys);
            let most = [
                tiles.shared(forward.0, forward.1),
                tiles.shared(2 * queries.0, queries.1),
                tiles.shared(2 * keys.0, keys.1),
            ];
            // Compute capability 8.6 and 8.9 give a block 99 KiB; starts and log-sums take up to 2 KiB of them.
            assert!(most.iter().all(|bytes| *bytes <= 97 << 10), "head dimension {head_dim}: {most:?}");
        }
    }
}
