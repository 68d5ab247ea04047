//! Causal attention within packed documents, in blocks of query rows (after Dao et al. 2022): scores of one block and one head
//! are all that is ever held.

use std::ops::Range;

use gpurun_types::DType;

use super::element::{Float, by_float};
use super::matmul::{Operand, product};
use super::{CpuBackend, Result, Shared, is, kernels, shape};
use crate::{Attention, AttentionBackward, AttentionShape};

/// Query rows worked on at a time: few enough that the gemm crate uses keys and values where they lie, in whole tiles of its
/// inner kernel.
const BLOCK: usize = 48;

/// The first key of a block lies at a multiple of this: whole vectors.
const ALIGN: usize = 16;

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

    /// Rows `rows` in fp32: where they lie, or widened into the buffer.
    fn rows<'a, T: Float>(self, src: &'a [T], rows: Range<usize>, buffer: &'a mut [f32]) -> Rows<'a> {
        if let Some(wide) = T::as_wide(src) {
            return Rows { data: &wide[self.row(rows.start).start..], stride: self.stride, dim: self.dim };
        }
        for (to, i) in buffer.chunks_exact_mut(self.dim).zip(rows) {
            T::load(&src[self.row(i)], to);
        }
        Rows { data: buffer, stride: self.dim, dim: self.dim }
    }

    /// Rows `0..seq` in fp32, one after the other.
    fn dense<'a, T: Float>(self, src: &[T], seq: usize, buffer: &'a mut [f32]) -> Rows<'a> {
        for (to, i) in buffer.chunks_exact_mut(self.dim).zip(0..seq) {
            T::load(&src[self.row(i)], to);
        }
        Rows { data: buffer, stride: self.dim, dim: self.dim }
    }

    /// Stores dense rows; other pieces of work write other heads.
    fn scatter<T: Float>(self, src: &[f32], rows: Range<usize>, out: &Shared<T>) {
        for (from, i) in src.chunks_exact(self.dim).zip(rows) {
            T::store(from, out.part(self.row(i)));
        }
    }
}

/// Rows of one head in fp32.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
}

impl<'a> Rows<'a> {
    fn from(self, first: usize) -> Self {
        Self { data: &self.data[first * self.stride..], ..self }
    }

    fn row(self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..i * self.stride + self.dim]
    }

    fn plain(self) -> Operand {
        Operand::new(self.data, self.stride, false)
    }
}

/// Rows of one head turned: `[dim, seq]`. The gemm crate would turn them again for each block of queries.
#[derive(Clone, Copy)]
struct Turned<'a> {
    data: &'a [f32],
    seq: usize,
}

impl<'a> Turned<'a> {
    fn new(rows: Rows<'_>, seq: usize, buffer: &'a mut [f32]) -> Self {
        // Sixteen rows at a time: whole lines of the cache are written.
        for first in (0..seq).step_by(16) {
            let rows = |i: usize| &rows.data[i * rows.stride..i * rows.stride + rows.dim];
            let last = (first + 16).min(seq);
            for column in 0..rows(first).len() {
                for (to, i) in buffer[column * seq + first..column * seq + last].iter_mut().zip(first..last) {
                    *to = rows(i)[column];
                }
            }
        }
        Self { data: buffer, seq }
    }

    /// All of it from a column on.
    fn from(self, column: usize) -> Operand {
        Operand::new(&self.data[column..], self.seq, false)
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
        Self { starts, keys: first.min(rows.start) / ALIGN * ALIGN..rows.end, rows }
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
    unsafe { product(mnk, a, b, d.as_mut_ptr(), mnk[1], add) };
}

/// One block of query rows of the forward, with the keys and values of its head.
struct Queries<'a> {
    q: Rows<'a>,
    k: Turned<'a>,
    v: Rows<'a>,
    scale: f32,
}

impl Queries<'_> {
    /// `softmax(scale q k') v` into `o`, and the log of the sums of exponentials into `lse`.
    fn forward(&self, sight: &Sight<'_>, scores: &mut [f32], o: &mut [f32], lse: &mut [f32]) {
        let Self { q, k, v, scale } = *self;
        let (m, n, dim) = (sight.rows.len(), sight.keys.len(), q.dim);
        let mut sums = [0.0; BLOCK];
        small([m, n, dim], q.plain(), k.from(sight.keys.start), scores, false);
        for (i, seen) in sight.each() {
            let row = &mut scores[i * n..(i + 1) * n];
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
            let row = &mut row[seen];
            let highest = kernels::max(row) * scale;
            sums[i] = kernels::exp_sum(row, scale, highest);
            lse[i] = highest + sums[i].ln();
        }
        small([m, dim, n], Operand::new(scores, n, false), v.from(sight.keys.start).plain(), o, false);
        for (row, sum) in o.chunks_exact_mut(dim).zip(&sums[..m]) {
            kernels::scale(row, 1.0 / sum);
        }
    }
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
            let (turned, rest) = room.buffer.split_at_mut(seq * dim);
            let (v, rest) = rest.split_at_mut(seq * dim);
            let (q, rest) = rest.split_at_mut(BLOCK * dim);
            let (o, scores) = rest.split_at_mut(BLOCK * dim);
            let k = Head::of(b, seq, packed, heads + kv, dim).dense(qkv, seq, v);
            let k = Turned::new(k, seq, turned);
            let v = Head::of(b, seq, packed, heads + kv_heads + kv, dim).dense(qkv, seq, v);
            for head in kv * group..(kv + 1) * group {
                let lse = lse.part((b * heads + head) * seq..(b * heads + head + 1) * seq);
                for first in (0..seq).step_by(BLOCK) {
                    let rows = first..(first + BLOCK).min(seq);
                    let sight = Sight::new(&starts[b * seq..(b + 1) * seq], rows.clone());
                    let q = Head::of(b, seq, packed, head, dim).rows(qkv, rows.clone(), q);
                    let block = Queries { q, k, v, scale: args.scale };
                    block.forward(&sight, scores, o, &mut lse[rows.clone()]);
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
            let mut room = self.borrow(5 * seq * dim + BLOCK * (4 * dim + 2 * seq));
            let mut room = Room::new(&mut room.buffer, seq, dim);
            let key = Head::of(b, seq, packed, heads + kv, dim);
            let value = Head::of(b, seq, packed, heads + kv_heads + kv, dim);
            let v = Turned::new(value.dense(qkv, seq, room.k), seq, room.v_turned);
            let k = key.dense(qkv, seq, room.k);
            let k_turned = Turned::new(k, seq, room.k_turned);
            room.sums.dk.fill(0.0);
            room.sums.dv.fill(0.0);
            for head in kv * group..(kv + 1) * group {
                let lse = &lse[(b * heads + head) * seq..(b * heads + head + 1) * seq];
                for first in (0..seq).step_by(BLOCK) {
                    let rows = first..(first + BLOCK).min(seq);
                    let sight = Sight::new(&starts[b * seq..(b + 1) * seq], rows.clone());
                    let query = Head::of(b, seq, packed, head, dim);
                    let flat = Head::of(b, seq, heads * dim, head, dim);
                    let block = Block {
                        q: query.rows(qkv, rows.clone(), room.q),
                        o: flat.rows(out, rows.clone(), room.o),
                        d: flat.rows(dout, rows.clone(), room.d),
                        k: k.from(sight.keys.start),
                        k_turned: k_turned.from(sight.keys.start),
                        v_turned: v.from(sight.keys.start),
                        lse: &lse[rows.clone()],
                        scale: args.forward.scale,
                    };
                    block.backward(&sight, &mut room.sums);
                    query.scatter(&room.sums.dq[..rows.len() * dim], rows, &dqkv);
                }
            }
            key.scatter(room.sums.dk, 0..seq, &dqkv);
            value.scatter(room.sums.dv, 0..seq, &dqkv);
        });
    }
}

/// Buffers of one key/value head's backward: for what must be widened, and for what is computed.
struct Room<'a> {
    k: &'a mut [f32],
    k_turned: &'a mut [f32],
    v_turned: &'a mut [f32],
    q: &'a mut [f32],
    o: &'a mut [f32],
    d: &'a mut [f32],
    sums: Sums<'a>,
}

/// Gradients of one key/value head and one block of queries, and the block's scores and their gradients.
struct Sums<'a> {
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    dq: &'a mut [f32],
    p: &'a mut [f32],
    dp: &'a mut [f32],
}

impl<'a> Room<'a> {
    fn new(mut room: &'a mut [f32], seq: usize, dim: usize) -> Self {
        let mut cut = |len: usize| {
            let (head, tail) = std::mem::take(&mut room).split_at_mut(len);
            room = tail;
            head
        };
        let (whole, block) = (seq * dim, BLOCK * dim);
        Self {
            k: cut(whole),
            k_turned: cut(whole),
            v_turned: cut(whole),
            q: cut(block),
            o: cut(block),
            d: cut(block),
            sums: Sums { dk: cut(whole), dv: cut(whole), dq: cut(block), p: cut(BLOCK * seq), dp: cut(BLOCK * seq) },
        }
    }
}

/// One block of query rows of one head, and the keys and values that it sees.
struct Block<'a> {
    q: Rows<'a>,
    o: Rows<'a>,
    d: Rows<'a>,
    k: Rows<'a>,
    k_turned: Operand,
    v_turned: Operand,
    lse: &'a [f32],
    scale: f32,
}

impl Block<'_> {
    /// `p` again from `lse`, then `dv += p' do`, `dp = do v'`, `ds`, `dq = ds k`, `dk += ds' q`.
    fn backward(&self, sight: &Sight<'_>, sums: &mut Sums<'_>) {
        let (m, n, dim) = (sight.rows.len(), sight.keys.len(), self.q.dim);
        let keys = sight.keys.start * dim..sight.keys.end * dim;
        let Sums { dk, dv, dq, p, dp } = sums;
        small([m, n, dim], self.q.plain(), self.k_turned, p, false);
        small([m, n, dim], self.d.plain(), self.v_turned, dp, false);
        for (i, seen) in sight.each() {
            let delta = kernels::dot(self.o.row(i), self.d.row(i));
            let (p, dp) = (&mut p[i * n..(i + 1) * n], &mut dp[i * n..(i + 1) * n]);
            for row in [&mut *p, &mut *dp] {
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
            }
            kernels::softmax_grad(&mut p[seen.clone()], &mut dp[seen], self.lse[i], delta, self.scale);
        }
        small([n, dim, m], Operand::new(p, n, true), self.d.plain(), &mut dv[keys.clone()], true);
        small([m, dim, n], Operand::new(dp, n, false), self.k.plain(), dq, false);
        small([n, dim, m], Operand::new(dp, n, true), self.q.plain(), &mut dk[keys], true);
    }
}
