//! Causal attention within packed documents, in blocks of query rows (after Dao et al. 2022): scores of one block and one head
//! are all that is ever held.

use std::ops::Range;

use gpurun_types::DType;

use super::element::{Float, by_float};
use super::matmul::{Operand, product};
use super::{CpuBackend, Result, Shared, is, kernels, shape};
use crate::{Attention, AttentionBackward, AttentionShape};

/// Query rows worked on at a time.
const BLOCK: usize = 64;

fn check(op: &'static str, a: &Attention) -> Result {
    let AttentionShape { batch, seq, heads, kv_heads, head_dim } = a.shape;
    super::float(op, "qkv", a.qkv)?;
    super::length(op, "qkv", a.qkv, batch * seq * a.shape.packed_width())?;
    is(op, "starts", a.starts, DType::I32, batch * seq)?;
    is(op, "out", a.out, a.qkv.dtype, batch * seq * heads * head_dim)?;
    is(op, "lse", a.lse, DType::F32, batch * heads * seq)?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || head_dim == 0 {
        return Err(shape(op, format!("{heads} heads, {kv_heads} key/value heads of {head_dim}")));
    }
    Ok(())
}

/// Where a head's rows lie in a `[batch * seq, stride]` matrix.
#[derive(Clone, Copy)]
struct Head {
    first: usize,
    stride: usize,
    dim: usize,
}

impl Head {
    fn of(batch: usize, seq: usize, stride: usize, head: usize, dim: usize) -> Self {
        Self { first: batch * seq * stride + head * dim, stride, dim }
    }

    fn row(self, i: usize) -> Range<usize> {
        let start = self.first + i * self.stride;
        start..start + self.dim
    }

    /// Rows `rows` as a dense fp32 matrix.
    fn gather<T: Float>(self, src: &[T], rows: Range<usize>, out: &mut [f32]) {
        for (to, i) in out.chunks_exact_mut(self.dim).zip(rows) {
            T::load(&src[self.row(i)], to);
        }
    }

    /// The other way; other pieces of work write other heads.
    fn scatter<T: Float>(self, src: &[f32], rows: Range<usize>, out: &Shared<T>) {
        for (from, i) in src.chunks_exact(self.dim).zip(rows) {
            T::store(from, out.part(self.row(i)));
        }
    }
}

/// The keys that a block of query rows can see, and each row's own.
struct Sight<'a> {
    starts: &'a [i32],
    rows: Range<usize>,
    keys: Range<usize>,
}

impl<'a> Sight<'a> {
    fn new(starts: &'a [i32], rows: Range<usize>) -> Self {
        let first = rows.clone().map(|i| starts[i].max(0) as usize).min().unwrap_or(0);
        Self { starts, keys: first.min(rows.start)..rows.end, rows }
    }

    /// For each row of the block: its index in it, and the keys it sees, counted from the first key of the block.
    fn each(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.rows.clone().map(|i| {
            let start = (self.starts[i].max(0) as usize).min(i);
            (i - self.rows.start, start - self.keys.start..i + 1 - self.keys.start)
        })
    }
}

/// `d = (add ? d : 0) + a b` of dense matrices, on this thread.
fn small(mnk: [usize; 3], a: Operand, b: Operand, d: &mut [f32], add: bool) {
    assert!(d.len() >= mnk[0] * mnk[1]);
    // SAFETY: `d` was checked; operands are made from slices of at least their size by the callers in this file.
    unsafe { product(mnk, a, b, 1.0, d.as_mut_ptr(), mnk[1], add, gemm::Parallelism::None) };
}

impl CpuBackend {
    pub(super) fn attention_forward_op(&self, args: &Attention) -> Result {
        check("attention_forward", args)?;
        by_float!(args.qkv, T => self.attention_forward_heads::<T>(args));
        Ok(())
    }

    fn attention_forward_heads<T: Float>(&self, args: &Attention) {
        let AttentionShape { batch, seq, heads, kv_heads, head_dim: dim } = args.shape;
        let (packed, group) = (args.shape.packed_width(), heads / kv_heads);
        let qkv = self.read::<T>(args.qkv);
        let starts = self.read::<i32>(args.starts);
        let out = Shared::new(self.write::<T>(args.out));
        let lse = Shared::new(self.write::<f32>(args.lse));
        self.pieces(batch * kv_heads, 1, |piece| {
            let (b, kv) = (piece.start / kv_heads, piece.start % kv_heads);
            let mut room = self.borrow(2 * seq * dim + BLOCK * (2 * dim + seq));
            let (k, rest) = room.buffer.split_at_mut(seq * dim);
            let (v, rest) = rest.split_at_mut(seq * dim);
            let (q, rest) = rest.split_at_mut(BLOCK * dim);
            let (o, scores) = rest.split_at_mut(BLOCK * dim);
            Head::of(b, seq, packed, heads + kv, dim).gather(qkv, 0..seq, k);
            Head::of(b, seq, packed, heads + kv_heads + kv, dim).gather(qkv, 0..seq, v);
            for head in kv * group..(kv + 1) * group {
                let lse = lse.part((b * heads + head) * seq..(b * heads + head + 1) * seq);
                for first in (0..seq).step_by(BLOCK) {
                    let rows = first..(first + BLOCK).min(seq);
                    let sight = Sight::new(&starts[b * seq..(b + 1) * seq], rows.clone());
                    let (m, n) = (rows.len(), sight.keys.len());
                    let keys = sight.keys.start * dim..sight.keys.end * dim;
                    Head::of(b, seq, packed, head, dim).gather(qkv, rows.clone(), q);
                    small([m, n, dim], Operand::new(q, dim, false), Operand::new(&k[keys.clone()], dim, true), scores, false);
                    for (i, seen) in sight.each() {
                        let row = &mut scores[i * n..(i + 1) * n];
                        row[..seen.start].fill(0.0);
                        row[seen.end..].fill(0.0);
                        let row = &mut row[seen];
                        let highest = kernels::max(row) * args.scale;
                        kernels::exp_scaled(row, args.scale, highest);
                        let sum = kernels::sum(row);
                        kernels::scale(row, 1.0 / sum);
                        lse[first + i] = highest + sum.ln();
                    }
                    small([m, dim, n], Operand::new(scores, n, false), Operand::new(&v[keys], dim, false), o, false);
                    Head::of(b, seq, heads * dim, head, dim).scatter(o, rows, &out);
                }
            }
        });
    }

    pub(super) fn attention_backward_op(&self, args: &AttentionBackward) -> Result {
        const OP: &str = "attention_backward";
        check(OP, &args.forward)?;
        is(OP, "dout", args.dout, args.forward.qkv.dtype, args.forward.out.len)?;
        is(OP, "dqkv", args.dqkv, args.forward.qkv.dtype, args.forward.qkv.len)?;
        by_float!(args.dout, T => self.attention_backward_heads::<T>(args));
        Ok(())
    }

    fn attention_backward_heads<T: Float>(&self, args: &AttentionBackward) {
        let AttentionShape { batch, seq, heads, kv_heads, head_dim: dim } = args.forward.shape;
        let (packed, group) = (args.forward.shape.packed_width(), heads / kv_heads);
        let (qkv, out) = (self.read::<T>(args.forward.qkv), self.read::<T>(args.forward.out));
        let dout = self.read::<T>(args.dout);
        let (starts, lse) = (self.read::<i32>(args.forward.starts), self.read::<f32>(args.forward.lse));
        let dqkv = Shared::new(self.write::<T>(args.dqkv));
        self.pieces(batch * kv_heads, 1, |piece| {
            let (b, kv) = (piece.start / kv_heads, piece.start % kv_heads);
            let mut room = self.borrow(4 * seq * dim + BLOCK * (4 * dim + 2 * seq));
            let mut parts = Parts::new(&mut room.buffer, seq, dim);
            let (key, value) = (
                Head::of(b, seq, packed, heads + kv, dim),
                Head::of(b, seq, packed, heads + kv_heads + kv, dim),
            );
            key.gather(qkv, 0..seq, parts.k);
            value.gather(qkv, 0..seq, parts.v);
            parts.dk.fill(0.0);
            parts.dv.fill(0.0);
            for head in kv * group..(kv + 1) * group {
                let lse = &lse[(b * heads + head) * seq..(b * heads + head + 1) * seq];
                for first in (0..seq).step_by(BLOCK) {
                    let rows = first..(first + BLOCK).min(seq);
                    let sight = Sight::new(&starts[b * seq..(b + 1) * seq], rows.clone());
                    let query = Head::of(b, seq, packed, head, dim);
                    let flat = Head::of(b, seq, heads * dim, head, dim);
                    query.gather(qkv, rows.clone(), parts.q);
                    flat.gather(out, rows.clone(), parts.o);
                    flat.gather(dout, rows.clone(), parts.d);
                    parts.block(&sight, lse, dim, args.forward.scale);
                    query.scatter(&parts.dq[..rows.len() * dim], rows, &dqkv);
                }
            }
            key.scatter(parts.dk, 0..seq, &dqkv);
            value.scatter(parts.dv, 0..seq, &dqkv);
        });
    }
}

/// Buffers of one key/value head's backward.
struct Parts<'a> {
    k: &'a mut [f32],
    v: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    q: &'a mut [f32],
    o: &'a mut [f32],
    d: &'a mut [f32],
    dq: &'a mut [f32],
    p: &'a mut [f32],
    dp: &'a mut [f32],
}

impl<'a> Parts<'a> {
    fn new(mut room: &'a mut [f32], seq: usize, dim: usize) -> Self {
        let mut cut = |len: usize| {
            let (head, tail) = std::mem::take(&mut room).split_at_mut(len);
            room = tail;
            head
        };
        let (whole, block) = (seq * dim, BLOCK * dim);
        Self {
            k: cut(whole),
            v: cut(whole),
            dk: cut(whole),
            dv: cut(whole),
            q: cut(block),
            o: cut(block),
            d: cut(block),
            dq: cut(block),
            p: cut(BLOCK * seq),
            dp: cut(BLOCK * seq),
        }
    }

    /// One block of query rows: `p` again from `lse`, then `dv += p' do`, `dp = do v'`, `ds`, `dq = ds k`, `dk += ds' q`.
    fn block(&mut self, sight: &Sight<'_>, lse: &[f32], dim: usize, scale: f32) {
        let (m, n) = (sight.rows.len(), sight.keys.len());
        let keys = sight.keys.start * dim..sight.keys.end * dim;
        let dense = |s: &[f32], width| Operand::new(s, width, false);
        let turned = |s: &[f32], width| Operand::new(s, width, true);
        small([m, n, dim], dense(self.q, dim), turned(&self.k[keys.clone()], dim), self.p, false);
        small([m, n, dim], dense(self.d, dim), turned(&self.v[keys.clone()], dim), self.dp, false);
        for (i, seen) in sight.each() {
            let delta = kernels::dot(&self.o[i * dim..(i + 1) * dim], &self.d[i * dim..(i + 1) * dim]);
            let (p, dp) = (&mut self.p[i * n..(i + 1) * n], &mut self.dp[i * n..(i + 1) * n]);
            for row in [&mut *p, &mut *dp] {
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
            }
            let (p, dp) = (&mut p[seen.clone()], &mut dp[seen]);
            kernels::exp_scaled(p, scale, lse[sight.rows.start + i]);
            kernels::softmax_grad(p, dp, delta, scale);
        }
        small([n, dim, m], turned(self.p, n), dense(self.d, dim), &mut self.dv[keys.clone()], true);
        small([m, dim, n], dense(self.dp, n), dense(&self.k[keys.clone()], dim), self.dq, false);
        small([n, dim, m], turned(self.dp, n), dense(self.q, dim), &mut self.dk[keys], true);
    }
}
