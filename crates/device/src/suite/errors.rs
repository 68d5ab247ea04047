//! Views that do not fit together are refused by name, before anything is written; empty ones are no work.

use crate::{
    AdamRun, AdamW, Attention, AttentionBackward, AttentionShape, Backend, CrossEntropy, DeviceError, Embedding,
    Matmul, NormBackward, NormForward, NormKind, NormRun, Rope, RoundingKey, ScalarSlot, StepScalars,
};
use gpurun_types::{ArenaId, DType, Lane, View};

use super::{Cx, Room, refused};

const LANE: Lane = Lane::Compute;

/// What can be wrong with one view, whatever the operation.
fn broken(view: View) -> [View; 5] {
    let other = if view.dtype == DType::I32 { DType::F32 } else { DType::I32 };
    [
        View { len: view.len + 1, ..view },
        View { dtype: other, ..view },
        View { offset: view.offset + 1, ..view },
        View { offset: 1 << 40, ..view },
        View { arena: ArenaId(9999), ..view },
    ]
}

/// An operation with one view of its arguments replaced.
type Replaced<'a, A> = (&'static str, &'a dyn Fn(&mut A, View), View);

/// Every broken form of every view must be refused.
fn each<A: Copy>(operation: &str, args: A, views: &[Replaced<'_, A>], run: impl Fn(A) -> Result<(), DeviceError>) {
    for (name, set, view) in views {
        for (i, bad) in broken(*view).into_iter().enumerate() {
            let mut args = args;
            set(&mut args, bad);
            eprintln!("  {operation}: {name} broken in way {i}");
            refused(operation, run(args));
        }
    }
}

macro_rules! views {
    ($args:ident: $t:ty; $($field:ident),*; $($optional:ident),*) => {
        &[
            $((stringify!($field), &|a: &mut $t, v: View| a.$field = v, $args.$field),)*
            $((stringify!($optional), &|a: &mut $t, v: View| a.$optional = Some(v), $args.$optional.expect("given")),)*
        ]
    };
}

/// Every operation.
pub fn shapes(cx: &Cx<'_>) {
    let room = cx.room();
    let backend = cx.backend;
    memory(backend, &room);
    pointwise(backend, &room);
    matmul(cx, &room);
    rows(backend, &room);
    norms(backend, &room);
    attention(cx, &room);
    optimizer(backend, &room);
}

fn memory(backend: &dyn Backend, room: &Room<'_>) {
    let view = room.blank(8);
    refused("upload", backend.upload(&[0; 3], view));
    refused("download", backend.download(view, &mut [0; 3]));
    for bad in &broken(view)[2..] {
        refused("upload", backend.upload(&vec![0; bad.bytes() as usize], *bad));
        refused("download", backend.download(*bad, &mut vec![0; bad.bytes() as usize]));
        refused("fill", backend.fill(LANE, *bad, 0.0));
    }
    let other = room.blank(8);
    for bad in broken(view) {
        refused("copy", backend.copy(LANE, bad, other));
        refused("copy", backend.copy(LANE, other, bad));
        refused("cast", backend.cast(LANE, bad, other));
        refused("cast", backend.cast(LANE, other, bad));
        refused("add_assign", backend.add_assign(LANE, bad, other));
        refused("add_assign", backend.add_assign(LANE, other, bad));
    }
}

fn pointwise(backend: &dyn Backend, room: &Room<'_>) {
    let (x, y, z, wide) = (room.blank(8), room.blank(8), room.blank(8), room.blank(16));
    for bad in broken(x) {
        refused("gelu_forward", backend.gelu_forward(LANE, bad, y));
        refused("gelu_forward", backend.gelu_forward(LANE, x, bad));
        refused("gelu_backward", backend.gelu_backward(LANE, bad, y, z));
        refused("gelu_backward", backend.gelu_backward(LANE, x, bad, z));
        refused("gelu_backward", backend.gelu_backward(LANE, x, y, bad));
        refused("swiglu_forward", backend.swiglu_forward(LANE, wide, bad, 2, 4));
        refused("swiglu_backward", backend.swiglu_backward(LANE, wide, bad, wide, 2, 4));
    }
    for bad in broken(wide) {
        refused("swiglu_forward", backend.swiglu_forward(LANE, bad, y, 2, 4));
        refused("swiglu_backward", backend.swiglu_backward(LANE, bad, y, wide, 2, 4));
        refused("swiglu_backward", backend.swiglu_backward(LANE, wide, y, bad, 2, 4));
    }
    let grad = room.blank_as(DType::F32, 4);
    for bad in broken(wide) {
        refused("bias_grad", backend.bias_grad(LANE, bad, grad, 4, 4));
    }
    for bad in broken(grad) {
        refused("bias_grad", backend.bias_grad(LANE, wide, bad, 4, 4));
    }
    let rope = Rope {
        x: room.blank(4 * 12),
        starts: room.ints(&[0; 4]),
        rows: 4,
        seq: 2,
        heads: 2,
        head_dim: 4,
        stride: 12,
        theta: 1e4,
        scaling: None,
        inverse: false,
    };
    let run = |rope| backend.rope(LANE, rope);
    each("rope", rope, views!(rope: Rope; x, starts;), run);
    refused("rope", run(Rope { head_dim: 3, ..rope }));
    refused("rope", run(Rope { heads: 4, ..rope }));
    refused("rope", run(Rope { seq: 3, ..rope }));
}

fn matmul(cx: &Cx<'_>, room: &Room<'_>) {
    let run = |args| cx.backend.matmul(LANE, args);
    let args = Matmul {
        a: room.blank(2 * 4),
        b: room.blank(4 * 3),
        d: room.blank(2 * 3),
        m: 2,
        n: 3,
        k: 4,
        transpose_a: false,
        transpose_b: false,
        bias: Some(room.blank(3)),
        residual: Some(room.blank(2 * 3)),
        accumulate: false,
    };
    each("matmul", args, views!(args: Matmul; a, b, d; bias, residual), run);
    refused("matmul", run(Matmul { accumulate: true, ..args }));
    let other = if cx.dtype == DType::F16 { DType::Bf16 } else { DType::F16 };
    refused("matmul", run(Matmul { b: room.blank_as(other, 12), ..args }));
    refused("matmul", run(Matmul { d: room.blank_as(other, 6), residual: None, ..args }));
    refused("matmul", run(Matmul { bias: Some(room.blank_as(other, 3)), ..args }));
    refused("matmul", run(Matmul { residual: Some(room.blank_as(other, 6)), ..args }));
}

fn rows(backend: &dyn Backend, room: &Room<'_>) {
    let forward = Embedding {
        tokens: room.ints(&[0; 4]),
        starts: room.ints(&[0; 4]),
        table: room.blank(5 * 3),
        positions: Some(room.blank(2 * 3)),
        seq: 2,
        width: 3,
    };
    let y = room.blank(4 * 3);
    let run = |args| backend.embedding_forward(LANE, args, y);
    each("embedding_forward", forward, views!(forward: Embedding; tokens, starts, table; positions), run);
    refused("embedding_forward", run(Embedding { seq: 3, ..forward }));
    broken(y).into_iter().for_each(|y| refused("embedding_forward", backend.embedding_forward(LANE, forward, y)));
    let tables = Embedding {
        table: room.blank_as(DType::F32, 5 * 3),
        positions: Some(room.blank_as(DType::F32, 2 * 3)),
        ..forward
    };
    let run = |args| backend.embedding_backward(LANE, args, y);
    each("embedding_backward", tables, views!(tables: Embedding; tokens, starts, table; positions), run);
    broken(y).into_iter().for_each(|y| refused("embedding_backward", backend.embedding_backward(LANE, tables, y)));
    let loss = CrossEntropy {
        logits: room.blank(2 * 3),
        targets: room.ints(&[0; 2]),
        loss: room.put_as(DType::F64, &[0.0]),
        row_losses: room.blank_as(DType::F32, 2),
        scale: room.put_as(DType::F32, &[1.0]),
        factor: 1.0,
        rows: 2,
        vocabulary: 3,
        backward: true,
    };
    let run = |args| backend.cross_entropy(LANE, args);
    each("cross_entropy", loss, views!(loss: CrossEntropy; logits, targets, loss, row_losses, scale;), run);
}

fn norms(backend: &dyn Backend, room: &Room<'_>) {
    let (rows, width) = (2, 6);
    let args = NormForward {
        kind: NormKind::Layer,
        x: room.blank(12),
        residual: Some(room.blank(12)),
        sum: Some(room.blank(12)),
        weight: room.blank(6),
        bias: Some(room.blank(6)),
        y: room.blank(12),
        mean: Some(room.blank_as(DType::F32, 2)),
        rstd: room.blank_as(DType::F32, 2),
        rows,
        width,
        eps: 1e-5,
    };
    let run = |args| backend.norm_forward(LANE, args);
    each("norm_forward", args, views!(args: NormForward; x, weight, y, rstd; residual, sum, bias, mean), run);
    refused("norm_forward", run(NormForward { residual: None, ..args }));
    refused("norm_forward", run(NormForward { sum: None, ..args }));
    refused("norm_forward", run(NormForward { mean: None, ..args }));
    refused("norm_forward", run(NormForward { kind: NormKind::Rms, mean: None, ..args }));
    refused("norm_forward", run(NormForward { kind: NormKind::Rms, bias: None, ..args }));
    let args = NormBackward {
        kind: NormKind::Layer,
        x: room.blank(12),
        weight: room.blank(6),
        mean: args.mean,
        rstd: args.rstd,
        dy: room.blank(12),
        carry: Some(room.blank(12)),
        dx: room.blank(12),
        dweight: room.blank_as(DType::F32, 6),
        dbias: Some(room.blank_as(DType::F32, 6)),
        scratch: room.scratch(backend.norm_backward_scratch(rows, width)),
        rows,
        width,
    };
    let run = |args| backend.norm_backward(LANE, args);
    each("norm_backward", args, views!(args: NormBackward; x, weight, rstd, dy, dx, dweight; mean, carry, dbias), run);
    refused("norm_backward", run(NormBackward { mean: None, ..args }));
    refused("norm_backward", run(NormBackward { kind: NormKind::Rms, mean: None, ..args }));
    refused("norm_backward", run(NormBackward { kind: NormKind::Rms, dbias: None, ..args }));
    if args.scratch.len > 0 {
        refused("norm_backward", run(NormBackward { scratch: args.scratch.slice(0, args.scratch.len - 1), ..args }));
    }
}

fn attention(cx: &Cx<'_>, room: &Room<'_>) {
    let shape = AttentionShape { batch: 1, seq: 2, heads: 2, kv_heads: 1, head_dim: 8 };
    let args = Attention {
        qkv: room.blank(2 * shape.packed_width()),
        starts: room.ints(&[0; 2]),
        out: room.blank(2 * 16),
        lse: room.blank_as(DType::F32, 4),
        scratch: room.scratch(cx.backend.attention_scratch(shape, cx.dtype)),
        shape,
        scale: 1.0,
    };
    let run = |args| cx.backend.attention_forward(LANE, args);
    each("attention_forward", args, views!(args: Attention; qkv, starts, out, lse;), run);
    let ungrouped = AttentionShape { heads: 3, kv_heads: 2, ..shape };
    refused(
        "attention_forward",
        run(Attention { shape: ungrouped, qkv: room.blank(2 * ungrouped.packed_width()), ..args }),
    );
    refused("attention_forward", run(Attention { shape: AttentionShape { kv_heads: 0, ..shape }, ..args }));
    let args = AttentionBackward { forward: args, dout: room.blank(2 * 16), dqkv: room.blank(args.qkv.len) };
    let run = |args| cx.backend.attention_backward(LANE, args);
    each("attention_backward", args, views!(args: AttentionBackward; dout, dqkv;), run);
    let forward = args.forward;
    let run = |forward| cx.backend.attention_backward(LANE, AttentionBackward { forward, ..args });
    each("attention_backward", forward, views!(forward: Attention; qkv, starts, out, lse;), run);
}

fn optimizer(backend: &dyn Backend, room: &Room<'_>) {
    let (src, partial) = (room.blank_as(DType::F32, 9), room.blank_as(DType::F64, 1));
    let norm = |src, partial| backend.norm_partial(LANE, &[NormRun { src, partial }]);
    broken(src).iter().skip(1).for_each(|bad| refused("norm_partial", norm(*bad, partial)));
    broken(partial).iter().for_each(|bad| refused("norm_partial", norm(src, *bad)));
    let args = StepScalars {
        partials: room.put_as(DType::F64, &[0.0; 6]),
        shards: 2,
        row: 3,
        units: 3,
        scalars: room.put_as(DType::F32, &[0.0; ScalarSlot::COUNT]),
        learning_rate: room.put_as(DType::F32, &[0.0]),
        clip: 1.0,
        beta1: 0.9,
        beta2: 0.95,
        scaling: None,
    };
    let run = |args| backend.step_scalars(LANE, args);
    each("step_scalars", args, views!(args: StepScalars; partials, scalars, learning_rate;), run);
    refused("step_scalars", run(StepScalars { units: 4, ..args }));
    let run = AdamRun {
        master: room.blank_as(DType::F32, 9),
        m: room.blank_as(DType::F32, 9),
        v: room.blank_as(DType::F32, 9),
        grad: room.blank_as(DType::F32, 9),
        weight: Some(room.blank(9)),
        weight_decay: 0.0,
        rounding: RoundingKey::default(),
    };
    let scalars = args.scalars;
    let with =
        |runs: &[AdamRun], scalars| backend.adamw(LANE, &AdamW { runs, scalars, beta1: 0.9, beta2: 0.95, eps: 1e-8 });
    each("adamw", run, views!(run: AdamRun; master, m, v, grad; weight), |run| with(&[run], scalars));
    broken(scalars).into_iter().for_each(|bad| refused("adamw", with(&[run], bad)));
    // Runs that differ in a type, or of which one has no weight.
    refused("adamw", with(&[run, AdamRun { weight: None, ..run }], scalars));
    let narrow = |view: View| View { dtype: DType::Bf16, ..view };
    refused("adamw", with(&[run, AdamRun { m: narrow(run.m), v: narrow(run.v), ..run }], scalars));
    refused("adamw", with(&[AdamRun { m: narrow(run.m), ..run }], scalars));
    let half = |view: View| View { dtype: DType::F16, ..view };
    refused("adamw", with(&[AdamRun { m: half(run.m), v: half(run.v), ..run }], scalars));
}

/// Views of no elements, and matrices of no rows, are no work and no error.
pub fn empty(cx: &Cx<'_>) {
    let room = cx.room();
    let backend = cx.backend;
    let none = room.blank(0);
    let single = |dtype| room.blank_as(dtype, 0);
    backend.upload(&[], none).expect("upload");
    backend.download(none, &mut []).expect("download");
    backend.fill(LANE, none, 1.0).expect("fill");
    backend.copy(LANE, none, none).expect("copy");
    backend.cast(LANE, none, single(DType::F32)).expect("cast");
    backend.add_assign(LANE, none, room.blank(0)).expect("add_assign");
    backend.gelu_forward(LANE, none, room.blank(0)).expect("gelu_forward");
    backend.gelu_backward(LANE, none, room.blank(0), room.blank(0)).expect("gelu_backward");
    backend.swiglu_forward(LANE, none, room.blank(0), 0, 8).expect("swiglu_forward");
    backend.swiglu_backward(LANE, none, room.blank(0), room.blank(0), 0, 8).expect("swiglu_backward");
    let grad = room.put_as(DType::F32, &[1.0, 2.0]);
    backend.bias_grad(LANE, none, grad, 0, 2).expect("bias_grad");
    assert_eq!(room.get(grad), [1.0, 2.0]);
    let partial = room.blank_as(DType::F64, 1);
    backend.norm_partial(LANE, &[]).expect("norm_partial");
    backend.norm_partial(LANE, &[NormRun { src: single(DType::F32), partial }]).expect("norm_partial");
    assert_eq!(room.get(partial), [0.0]);
    let args = Matmul {
        a: none,
        b: room.put(&cx.normal(6, 1.0)),
        d: room.blank(0),
        m: 0,
        n: 2,
        k: 3,
        transpose_a: false,
        transpose_b: false,
        bias: None,
        residual: None,
        accumulate: false,
    };
    backend.matmul(LANE, args).expect("matmul");
    let empty = single(DType::F32);
    let run = AdamRun {
        master: empty,
        m: empty,
        v: empty,
        grad: empty,
        weight: Some(none),
        weight_decay: 0.0,
        rounding: RoundingKey::default(),
    };
    let scalars = room.put_as(DType::F32, &[0.0; ScalarSlot::COUNT]);
    for runs in [&[][..], &[run]] {
        let args = AdamW { runs, scalars, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
        backend.adamw(LANE, &args).expect("adamw");
    }
}
