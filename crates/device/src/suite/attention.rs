//! Attention.

use crate::{Attention, AttentionBackward, AttentionShape};
use gpurun_types::{DType, Lane};

use super::{Cx, Room, rounded};

/// Batch, sequence length, query heads, key/value heads, elements per head.
const SHAPES: [[usize; 5]; 9] = [
    [1, 1, 1, 1, 8],
    [2, 1, 3, 1, 16],
    [2, 37, 3, 3, 32],
    [2, 37, 3, 1, 16],
    [1, 64, 4, 2, 64],
    [3, 65, 2, 2, 24],
    [1, 130, 4, 1, 32],
    [2, 128, 2, 2, 128],
    [1, 300, 2, 1, 64],
];

fn shapes() -> impl Iterator<Item = AttentionShape> {
    SHAPES.into_iter().map(|[batch, seq, heads, kv_heads, head_dim]| AttentionShape {
        batch,
        seq,
        heads,
        kv_heads,
        head_dim,
    })
}

/// Inputs and the fp64 results of forward and backward.
struct Reference {
    shape: AttentionShape,
    scale: f64,
    qkv: Vec<f64>,
    starts: Vec<i32>,
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Reference {
    fn new(cx: &Cx<'_>, shape: AttentionShape) -> Self {
        let AttentionShape { batch, seq, heads, head_dim, .. } = shape;
        let mut this = Self {
            shape,
            scale: f64::from((head_dim as f32).sqrt().recip()),
            qkv: cx.normal(batch * seq * shape.packed_width(), 1.0),
            starts: cx.starts(batch, seq),
            out: vec![0.0; batch * seq * heads * head_dim],
            lse: vec![0.0; batch * heads * seq],
        };
        for (b, head, i) in this.queries() {
            let p = this.probabilities(b, head, i);
            let highest = p.iter().map(|(_, s, _)| *s).fold(f64::NEG_INFINITY, f64::max);
            this.lse[(b * heads + head) * seq + i] =
                highest + p.iter().map(|(_, s, _)| (s - highest).exp()).sum::<f64>().ln();
            for (j, _, p) in p {
                for e in 0..head_dim {
                    let value = this.qkv[this.at(b, j, this.value_head(head), e)];
                    this.out[((b * seq + i) * heads + head) * head_dim + e] += p * value;
                }
            }
        }
        this
    }

    fn queries(&self) -> Vec<(usize, usize, usize)> {
        let AttentionShape { batch, seq, heads, .. } = self.shape;
        (0..batch * heads * seq).map(|n| (n / seq / heads, n / seq % heads, n % seq)).collect()
    }

    /// Index of an element of a packed row.
    fn at(&self, b: usize, i: usize, packed_head: usize, e: usize) -> usize {
        (b * self.shape.seq + i) * self.shape.packed_width() + packed_head * self.shape.head_dim + e
    }

    fn key_head(&self, head: usize) -> usize {
        self.shape.heads + head * self.shape.kv_heads / self.shape.heads
    }

    fn value_head(&self, head: usize) -> usize {
        self.key_head(head) + self.shape.kv_heads
    }

    /// Key, scaled score, probability, for the keys that a query sees.
    fn probabilities(&self, b: usize, head: usize, i: usize) -> Vec<(usize, f64, f64)> {
        let start = self.starts[b * self.shape.seq + i] as usize;
        let scores: Vec<f64> = (start..=i)
            .map(|j| {
                let pairs = (0..self.shape.head_dim)
                    .map(|e| self.qkv[self.at(b, i, head, e)] * self.qkv[self.at(b, j, self.key_head(head), e)]);
                pairs.sum::<f64>() * self.scale
            })
            .collect();
        let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - highest).exp()).sum();
        (start..=i).zip(&scores).map(|(j, s)| (j, *s, (s - highest).exp() / sum)).collect()
    }

    /// Gradient of the packed rows.
    fn backward(&self, dout: &[f64]) -> Vec<f64> {
        let AttentionShape { seq, heads, head_dim, .. } = self.shape;
        let mut grad = vec![0.0; self.qkv.len()];
        for (b, head, i) in self.queries() {
            let row = ((b * seq + i) * heads + head) * head_dim;
            let (dout, out) = (&dout[row..row + head_dim], &self.out[row..row + head_dim]);
            let delta: f64 = dout.iter().zip(out).map(|(d, o)| d * o).sum();
            for (j, _, p) in self.probabilities(b, head, i) {
                let value = self.at(b, j, self.value_head(head), 0);
                let dp: f64 = dout.iter().zip(&self.qkv[value..]).map(|(d, v)| d * v).sum();
                let ds = p * (dp - delta) * self.scale;
                let (query, key) = (self.at(b, i, head, 0), self.at(b, j, self.key_head(head), 0));
                for e in 0..head_dim {
                    grad[value + e] += p * dout[e];
                    grad[query + e] += ds * self.qkv[key + e];
                    grad[key + e] += ds * self.qkv[query + e];
                }
            }
        }
        grad
    }

    fn place(&self, cx: &Cx<'_>, room: &Room<'_>) -> Attention {
        Attention {
            qkv: room.put(&self.qkv),
            starts: room.ints(&self.starts),
            out: room.blank(self.out.len()),
            lse: room.blank_as(DType::F32, self.lse.len()),
            scratch: room.scratch(cx.backend.attention_scratch(self.shape, cx.dtype)),
            shape: self.shape,
            scale: self.scale as f32,
        }
    }
}

/// Outputs and log-sum-exp, with packed documents and grouped heads.
pub fn forward(cx: &Cx<'_>) {
    for shape in shapes() {
        let room = cx.room();
        let reference = Reference::new(cx, shape);
        let args = reference.place(cx, &room);
        cx.backend.attention_forward(Lane::Compute, args).expect("attention_forward");
        cx.close(&format!("out of {shape:?}"), &room, args.out, &reference.out, 1.0);
        // A score is a sum of products of values of order one; a log has no relative error to speak of near zero.
        cx.close(&format!("lse of {shape:?}"), &room, args.lse, &reference.lse, 2.0);
    }
}

/// Gradients, from the exact outputs rounded to the storage type.
pub fn backward(cx: &Cx<'_>) {
    for shape in shapes() {
        let room = cx.room();
        let reference = Reference::new(cx, shape);
        let forward = reference.place(cx, &room);
        room.set(forward.out, &rounded(&reference.out, cx.dtype));
        room.set(forward.lse, &reference.lse);
        let dout = cx.normal(reference.out.len(), 1.0);
        let want = reference.backward(&dout);
        let args = AttentionBackward { forward, dout: room.put(&dout), dqkv: room.blank(want.len()) };
        cx.backend.attention_backward(Lane::Compute, args).expect("attention_backward");
        // Probabilities and their gradients may be rounded to the storage type between the products.
        cx.close(&format!("dqkv of {shape:?}"), &room, args.dqkv, &want, 2.0);
    }
}
