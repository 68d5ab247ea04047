//! The operations as a [`Backend`]: every view is checked before anything is enqueued.

use gpurun_types::{ArenaId, Bytes, Lane, Place, View};

use super::{CudaBackend, Result};
use crate::{
    AdamW, Attention, AttentionBackward, Backend, CrossEntropy, Embedding, Mark, Matmul, NormBackward, NormForward,
    NormRun, Raw, Rope, StepScalars,
};

impl Backend for CudaBackend {
    fn name(&self) -> String {
        self.driver.name.clone()
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn allocate(&self, place: Place, bytes: Bytes) -> Result<ArenaId> {
        self.allocate_arena(place, bytes)
    }

    fn release(&self, arena: ArenaId) -> Result {
        self.release_arena(arena)
    }

    fn allocated(&self, place: Place) -> Bytes {
        self.allocated_bytes(place)
    }

    fn upload(&self, src: &[u8], dst: View) -> Result {
        self.upload_bytes(src, dst)
    }

    fn download(&self, src: View, dst: &mut [u8]) -> Result {
        self.download_bytes(src, dst)
    }

    fn host_pointer(&self, view: View) -> Option<*mut u8> {
        self.host.host_pointer(self.on_host("host_pointer", view).ok()?)
    }

    fn record(&self, lane: Lane) -> Result<Mark> {
        // Work on the host lane is done when the call that asked for it returns.
        if lane == Lane::Host { Ok(Mark { lane, number: 0 }) } else { self.driver.record(lane) }
    }

    fn wait(&self, lane: Lane, mark: Mark) -> Result {
        self.driver.wait(lane, mark)
    }

    fn synchronize(&self, lane: Lane) -> Result {
        self.driver.synchronize(lane)?;
        self.faults.take()
    }

    fn passed(&self, mark: Mark) -> Result<bool> {
        if mark.lane == Lane::Host { Ok(true) } else { self.driver.passed(mark) }
    }

    fn raw(&self, operation: &'static str, lane: Lane, views: &[View]) -> Result<Raw> {
        self.check(operation, views.iter().copied())?;
        self.driver.enter()?;
        let addresses = views.iter().map(|view| self.address(*view)).collect();
        Ok(Raw { stream: self.driver.stream(lane).cast(), addresses })
    }

    fn fill(&self, lane: Lane, dst: View, value: f32) -> Result {
        self.check("fill", [dst])?;
        match lane {
            Lane::Host => self.host.fill(lane, self.on_host("fill", dst)?, value),
            _ => self.fill_op(lane, dst, value),
        }
    }

    fn copy(&self, lane: Lane, src: View, dst: View) -> Result {
        self.check("copy", [src, dst])?;
        match lane {
            Lane::Host => self.host.copy(lane, self.on_host("copy", src)?, self.on_host("copy", dst)?),
            _ => self.copy_op(lane, src, dst),
        }
    }

    fn cast(&self, lane: Lane, src: View, dst: View) -> Result {
        self.check("cast", [src, dst])?;
        match lane {
            Lane::Host => self.host.cast(lane, self.on_host("cast", src)?, self.on_host("cast", dst)?),
            _ => self.cast_op(lane, src, dst),
        }
    }

    fn add_assign(&self, lane: Lane, src: View, dst: View) -> Result {
        const OP: &str = "add_assign";
        self.check(OP, [src, dst])?;
        match lane {
            Lane::Host => self.host.add_assign(lane, self.on_host(OP, src)?, self.on_host(OP, dst)?),
            _ => self.add_assign_op(lane, src, dst),
        }
    }

    fn matmul(&self, lane: Lane, args: Matmul) -> Result {
        self.check("matmul", [args.a, args.b, args.d].into_iter().chain(args.bias).chain(args.residual))?;
        self.matmul_op(lane, &args)
    }

    fn bias_grad(&self, lane: Lane, dy: View, grad: View, rows: usize, columns: usize) -> Result {
        self.check("bias_grad", [dy, grad])?;
        self.bias_grad_op(lane, dy, grad, rows, columns)
    }

    fn embedding_forward(&self, lane: Lane, args: Embedding, y: View) -> Result {
        self.check("embedding_forward", [args.tokens, args.starts, args.table, y].into_iter().chain(args.positions))?;
        self.embedding_forward_op(lane, &args, y)
    }

    fn embedding_backward(&self, lane: Lane, args: Embedding, dy: View) -> Result {
        self.check("embedding_backward", [args.tokens, args.starts, args.table, dy].into_iter().chain(args.positions))?;
        self.embedding_backward_op(lane, &args, dy)
    }

    fn norm_forward(&self, lane: Lane, args: NormForward) -> Result {
        let needed = [args.x, args.weight, args.y, args.rstd];
        let optional = [args.residual, args.sum, args.bias, args.mean];
        self.check("norm_forward", needed.into_iter().chain(optional.into_iter().flatten()))?;
        self.norm_forward_op(lane, &args)
    }

    fn norm_backward(&self, lane: Lane, args: NormBackward) -> Result {
        let needed = [args.x, args.weight, args.rstd, args.dy, args.dx, args.dweight, args.scratch];
        let optional = [args.mean, args.carry, args.dbias];
        self.check("norm_backward", needed.into_iter().chain(optional.into_iter().flatten()))?;
        self.norm_backward_op(lane, &args)
    }

    fn rope(&self, lane: Lane, args: Rope) -> Result {
        self.check("rope", [args.x, args.starts])?;
        self.rope_op(lane, &args)
    }

    fn attention_forward(&self, lane: Lane, args: Attention) -> Result {
        self.check("attention_forward", [args.qkv, args.starts, args.out, args.lse, args.scratch])?;
        self.attention_forward_op(lane, &args)
    }

    fn attention_backward(&self, lane: Lane, args: AttentionBackward) -> Result {
        let f = args.forward;
        self.check("attention_backward", [f.qkv, f.starts, f.out, f.lse, f.scratch, args.dout, args.dqkv])?;
        self.attention_backward_op(lane, &args)
    }

    fn whole_documents(&self, whole: bool) {
        self.set_whole_documents(whole);
    }

    fn gelu_forward(&self, lane: Lane, x: View, y: View) -> Result {
        self.check("gelu_forward", [x, y])?;
        self.gelu_forward_op(lane, x, y)
    }

    fn gelu_backward(&self, lane: Lane, x: View, dy: View, dx: View) -> Result {
        self.check("gelu_backward", [x, dy, dx])?;
        self.gelu_backward_op(lane, x, dy, dx)
    }

    fn swiglu_forward(&self, lane: Lane, x: View, y: View, rows: usize, width: usize) -> Result {
        self.check("swiglu_forward", [x, y])?;
        self.swiglu_forward_op(lane, x, y, rows, width)
    }

    fn swiglu_backward(&self, lane: Lane, x: View, dy: View, dx: View, rows: usize, width: usize) -> Result {
        self.check("swiglu_backward", [x, dy, dx])?;
        self.swiglu_backward_op(lane, x, dy, dx, rows, width)
    }

    fn cross_entropy(&self, lane: Lane, args: CrossEntropy) -> Result {
        self.check("cross_entropy", [args.logits, args.targets, args.loss, args.row_losses, args.scale])?;
        self.cross_entropy_op(lane, &args)
    }

    fn norm_partial(&self, lane: Lane, runs: &[NormRun]) -> Result {
        self.check("norm_partial", runs.iter().flat_map(|run| [run.src, run.partial]))?;
        self.norm_partial_op(lane, runs)
    }

    fn step_scalars(&self, lane: Lane, args: StepScalars) -> Result {
        self.check("step_scalars", [args.partials, args.scalars, args.learning_rate])?;
        self.step_scalars_op(lane, &args)
    }

    fn adamw(&self, lane: Lane, args: &AdamW<'_>) -> Result {
        self.check("adamw", args.views())?;
        self.adamw_op(lane, args)
    }

    fn triad(&self, dst: View, a: View, b: View, past_caches: bool) -> Result {
        self.check("triad", [dst, a, b])?;
        let at = |view: View| self.on_host("triad", view);
        self.host.triad(at(dst)?, at(a)?, at(b)?, past_caches)
    }
}
