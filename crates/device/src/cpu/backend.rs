//! The operations as a [`Backend`]: every view is checked before anything is read or written.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use gpurun_types::{ArenaId, Bytes, Lane, Place, View};

use super::arena::Arena;
use super::{CpuBackend, Result, shape};
use crate::{
    AdamW, Attention, AttentionBackward, Backend, CrossEntropy, DeviceError, Embedding, Mark, Matmul, NormBackward,
    NormForward, NormRun, Rope, StepScalars,
};

impl Backend for CpuBackend {
    fn name(&self) -> String {
        let plural = if self.threads == 1 { "" } else { "s" };
        format!("cpu ({} thread{plural})", self.threads)
    }

    fn is_asynchronous(&self) -> bool {
        false
    }

    fn allocate(&self, place: Place, bytes: Bytes) -> Result<ArenaId> {
        if self.sealed.load(Ordering::Relaxed) {
            let reason = "the backend is sealed: all memory was to be there before the first step".to_owned();
            return Err(DeviceError::OutOfMemory { place, bytes, reason });
        }
        let arena = Arena::new(place, bytes)?;
        self.touch(&arena);
        let mut arenas = self.arenas.write().unwrap_or_else(PoisonError::into_inner);
        arenas.push(arena);
        Ok(ArenaId(arenas.len() as u32 - 1))
    }

    fn release(&self, arena: ArenaId) -> Result {
        let mut arenas = self.arenas.write().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = arenas.get_mut(arena.0 as usize) else {
            return Err(shape("release", format!("there is no arena {}", arena.0)));
        };
        *old = Arena::new(old.place(), Bytes(0))?;
        Ok(())
    }

    fn allocated(&self, place: Place) -> Bytes {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        arenas.iter().filter(|a| a.place() == place).map(|a| Bytes(a.bytes())).sum()
    }

    fn upload(&self, src: &[u8], dst: View) -> Result {
        self.check("upload", [dst])?;
        if src.len() as u64 != dst.bytes() {
            return Err(shape("upload", format!("{} bytes into a view of {}", src.len(), dst.bytes())));
        }
        self.bytes_of(dst).copy_from_slice(src);
        Ok(())
    }

    fn download(&self, src: View, dst: &mut [u8]) -> Result {
        self.check("download", [src])?;
        if dst.len() as u64 != src.bytes() {
            return Err(shape("download", format!("a view of {} bytes into {}", src.bytes(), dst.len())));
        }
        dst.copy_from_slice(self.bytes_of(src));
        Ok(())
    }

    fn host_pointer(&self, view: View) -> Option<*mut u8> {
        Some(self.pointer(view))
    }

    fn record(&self, lane: Lane) -> Result<Mark> {
        Ok(Mark { lane, number: 0 })
    }

    fn wait(&self, _lane: Lane, _mark: Mark) -> Result {
        Ok(())
    }

    fn synchronize(&self, _lane: Lane) -> Result {
        Ok(())
    }

    fn fill(&self, _lane: Lane, dst: View, value: f32) -> Result {
        self.check("fill", [dst])?;
        self.fill_op(dst, value)
    }

    fn copy(&self, _lane: Lane, src: View, dst: View) -> Result {
        self.check("copy", [src, dst])?;
        self.copy_op(src, dst)
    }

    fn cast(&self, _lane: Lane, src: View, dst: View) -> Result {
        self.check("cast", [src, dst])?;
        self.cast_op(src, dst)
    }

    fn add_assign(&self, _lane: Lane, src: View, dst: View) -> Result {
        self.check("add_assign", [src, dst])?;
        self.add_assign_op(src, dst)
    }

    fn matmul(&self, _lane: Lane, args: Matmul) -> Result {
        self.check("matmul", [args.a, args.b, args.d].into_iter().chain(args.bias).chain(args.residual))?;
        self.matmul_op(&args)
    }

    fn bias_grad(&self, _lane: Lane, dy: View, grad: View, rows: usize, columns: usize) -> Result {
        self.check("bias_grad", [dy, grad])?;
        self.bias_grad_op(dy, grad, rows, columns)
    }

    fn embedding_forward(&self, _lane: Lane, args: Embedding, y: View) -> Result {
        self.check("embedding_forward", [args.tokens, args.starts, args.table, y].into_iter().chain(args.positions))?;
        self.embedding_forward_op(&args, y)
    }

    fn embedding_backward(&self, _lane: Lane, args: Embedding, dy: View) -> Result {
        self.check("embedding_backward", [args.tokens, args.starts, args.table, dy].into_iter().chain(args.positions))?;
        self.embedding_backward_op(&args, dy)
    }

    fn norm_forward(&self, _lane: Lane, args: NormForward) -> Result {
        let needed = [args.x, args.weight, args.y, args.rstd];
        let optional = [args.residual, args.sum, args.bias, args.mean];
        self.check("norm_forward", needed.into_iter().chain(optional.into_iter().flatten()))?;
        self.norm_forward_op(&args)
    }

    fn norm_backward(&self, _lane: Lane, args: NormBackward) -> Result {
        let needed = [args.x, args.weight, args.rstd, args.dy, args.dx, args.dweight, args.scratch];
        let optional = [args.mean, args.carry, args.dbias];
        self.check("norm_backward", needed.into_iter().chain(optional.into_iter().flatten()))?;
        self.norm_backward_op(&args)
    }

    fn rope(&self, _lane: Lane, args: Rope) -> Result {
        self.check("rope", [args.x, args.starts])?;
        self.rope_op(&args)
    }

    fn attention_forward(&self, _lane: Lane, args: Attention) -> Result {
        self.check("attention_forward", [args.qkv, args.starts, args.out, args.lse, args.scratch])?;
        self.attention_forward_op(&args)
    }

    fn attention_backward(&self, _lane: Lane, args: AttentionBackward) -> Result {
        let f = args.forward;
        self.check("attention_backward", [f.qkv, f.starts, f.out, f.lse, f.scratch, args.dout, args.dqkv])?;
        self.attention_backward_op(&args)
    }

    fn gelu_forward(&self, _lane: Lane, x: View, y: View) -> Result {
        self.check("gelu_forward", [x, y])?;
        self.gelu_forward_op(x, y)
    }

    fn gelu_backward(&self, _lane: Lane, x: View, dy: View, dx: View) -> Result {
        self.check("gelu_backward", [x, dy, dx])?;
        self.gelu_backward_op(x, dy, dx)
    }

    fn swiglu_forward(&self, _lane: Lane, x: View, y: View, rows: usize, width: usize) -> Result {
        self.check("swiglu_forward", [x, y])?;
        self.swiglu_forward_op(x, y, rows, width)
    }

    fn swiglu_backward(&self, _lane: Lane, x: View, dy: View, dx: View, rows: usize, width: usize) -> Result {
        self.check("swiglu_backward", [x, dy, dx])?;
        self.swiglu_backward_op(x, dy, dx, rows, width)
    }

    fn cross_entropy(&self, _lane: Lane, args: CrossEntropy) -> Result {
        self.check("cross_entropy", [args.logits, args.targets, args.loss, args.row_losses, args.scale])?;
        self.cross_entropy_op(&args)
    }

    fn norm_partial(&self, _lane: Lane, runs: &[NormRun]) -> Result {
        self.check("norm_partial", runs.iter().flat_map(|run| [run.src, run.partial]))?;
        self.norm_partial_op(runs)
    }

    fn step_scalars(&self, _lane: Lane, args: StepScalars) -> Result {
        self.check("step_scalars", [args.partials, args.scalars, args.learning_rate])?;
        self.step_scalars_op(&args)
    }

    fn adamw(&self, _lane: Lane, args: &AdamW<'_>) -> Result {
        self.check("adamw", args.views())?;
        self.adamw_op(args)
    }

    fn triad(&self, dst: View, a: View, b: View, past_caches: bool) -> Result {
        self.check("triad", [dst, a, b])?;
        self.triad_op(dst, a, b, past_caches)
    }
}
