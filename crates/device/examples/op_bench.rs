//! Speed of each operation at the sizes of one GPT-2 training step on the CPU backend.
//!
//! `op_bench [--model tiny|10m]... [--threads N]... [--dtype fp32|bf16|fp16] [--repeats N] [--only PART-OF-A-NAME]`
//!
//! One line per operation: times it occurs in a step, microseconds for one (the best and the median of all repeats),
//! milliseconds in the step (of the best), and GFLOP/s or GB/s. The first lines are the ceilings: one large matrix product, one large copy.

use std::time::Instant;

use gpurun_device::{
    AdamRun, AdamW, Attention, AttentionBackward, AttentionShape, Backend, CpuBackend, CrossEntropy, Embedding, Matmul,
    NormBackward, NormForward, NormKind, NormRun, RoundingKey, ScalarSlot, ScratchSizes, StepScalars,
};
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

/// Sizes of a GPT-2 and its batch.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    layers: usize,
    width: usize,
    heads: usize,
    vocabulary: usize,
    batch: usize,
    seq: usize,
}

const MODELS: [Model; 2] = [
    Model { name: "tiny", layers: 4, width: 128, heads: 4, vocabulary: 257, batch: 16, seq: 128 },
    Model { name: "10m", layers: 6, width: 384, heads: 6, vocabulary: 257, batch: 8, seq: 256 },
];

/// What one run of an operation costs.
enum Cost {
    Flops(usize),
    Bytes(usize),
}

struct Bench {
    backend: CpuBackend,
    arena: ArenaId,
    next: u64,
    dtype: DType,
    repeats: usize,
    only: String,
    step: f64,
}

const ARENA: u64 = 1 << 30;
const C: Lane = Lane::Compute;

impl Bench {
    fn new(threads: usize, dtype: DType, repeats: usize, only: &str) -> Result<Self, String> {
        let backend = CpuBackend::new(threads).map_err(|e| e.to_string())?;
        let arena = backend.allocate(Place::Device, Bytes(ARENA)).map_err(|e| e.to_string())?;
        Ok(Self { backend, arena, next: 0, dtype, repeats, only: only.to_owned(), step: 0.0 })
    }

    fn room(&mut self, dtype: DType, len: usize) -> View {
        let view = View { arena: self.arena, offset: self.next, len, dtype };
        self.next = (self.next + view.bytes()).next_multiple_of(256);
        assert!(self.next <= ARENA, "the sizes need a larger arena");
        view
    }

    /// A view of small values, not all alike.
    fn view_as(&mut self, dtype: DType, len: usize) -> View {
        let (view, wide) = (self.room(dtype, len), self.room(DType::F32, len));
        let mut state = 1u32;
        let bytes: Vec<u8> = (0..len)
            .flat_map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as f32 / (1 << 24) as f32 - 0.5).to_le_bytes()
            })
            .collect();
        self.backend.upload(&bytes, wide).expect("the view has that length");
        self.backend.cast(C, wide, view).expect("both are floating types of one length");
        self.next = (view.offset + view.bytes()).next_multiple_of(256);
        view
    }

    fn view(&mut self, len: usize) -> View {
        self.view_as(self.dtype, len)
    }

    fn ints(&mut self, values: impl Iterator<Item = i32>) -> View {
        let bytes: Vec<u8> = values.flat_map(i32::to_le_bytes).collect();
        let view = self.room(DType::I32, bytes.len() / 4);
        self.backend.upload(&bytes, view).expect("the view has that length");
        view
    }

    /// Times `run`, which happens `count` times a step.
    fn time(
        &mut self,
        name: &str,
        count: usize,
        cost: Cost,
        run: impl Fn(&CpuBackend) -> Result<(), gpurun_device::DeviceError>,
    ) {
        if !name.contains(&self.only) {
            return;
        }
        let mut times = Vec::new();
        for _ in 0..self.repeats.max(1) + 1 {
            let begin = Instant::now();
            run(&self.backend).expect("the shapes fit together");
            times.push(begin.elapsed().as_secs_f64());
        }
        times.remove(0);
        times.sort_by(f64::total_cmp);
        let (time, median) = (times[0], times[times.len() / 2] * 1e6);
        self.step += time * count as f64;
        let (rate, unit) = match cost {
            Cost::Flops(flops) => (flops as f64 / time / 1e9, "GFLOP/s"),
            Cost::Bytes(bytes) => (bytes as f64 / time / 1e9, "GB/s"),
        };
        let (micros, millis) = (time * 1e6, time * count as f64 * 1e3);
        println!("{name:28} {count:4} x {micros:9.1} us (median {median:9.1}) {millis:9.2} ms {rate:9.1} {unit}");
    }

    fn ceilings(&mut self) {
        let n = 1024;
        let (a, b, d) = (self.view(n * n), self.view(n * n), self.view(n * n));
        let args = matmul(a, b, d, [n, n, n], [false, false]);
        self.time("ceiling: matmul 1024^3", 0, Cost::Flops(2 * n * n * n), move |x| x.matmul(C, args));
        let len = 64 << 20 >> 2;
        let (from, to) = (self.view_as(DType::F32, len), self.room(DType::F32, len));
        self.time("ceiling: copy 64 MiB", 0, Cost::Bytes(8 * len), move |x| x.copy(C, from, to));
        self.next = 0;
    }

    /// `y = x w' + bias`, `dx = dy w`, `dw += dy' x`, `dbias`.
    fn linear(&mut self, name: &str, count: usize, rows: usize, from: usize, to: usize) {
        let flops = || Cost::Flops(2 * rows * from * to);
        let (x, w, bias, y) = (self.view(rows * from), self.view(from * to), self.view(to), self.view(rows * to));
        let (dw, dbias) = (self.view_as(DType::F32, from * to), self.view_as(DType::F32, to));
        let forward = Matmul { bias: Some(bias), ..matmul(x, w, y, [rows, to, from], [false, true]) };
        self.time(&format!("{name} forward"), count, flops(), move |b| b.matmul(C, forward));
        let dx = matmul(y, w, x, [rows, from, to], [false, false]);
        self.time(&format!("{name} dx"), count, flops(), move |b| b.matmul(C, dx));
        let dweight = Matmul { accumulate: true, ..matmul(y, x, dw, [to, from, rows], [true, false]) };
        self.time(&format!("{name} dweight"), count, flops(), move |b| b.matmul(C, dweight));
        let bytes = Cost::Bytes(y.bytes() as usize);
        self.time(&format!("{name} dbias"), count, bytes, move |b| b.bias_grad(C, y, dbias, rows, to));
    }

    fn norms(&mut self, m: Model) {
        let (rows, width) = (m.batch * m.seq, m.width);
        let (count, bytes) = (2 * m.layers + 1, self.dtype.size() * rows * width);
        let forward = NormForward {
            kind: NormKind::Layer,
            x: self.view(rows * width),
            residual: Some(self.view(rows * width)),
            sum: Some(self.view(rows * width)),
            weight: self.view(width),
            bias: Some(self.view(width)),
            y: self.view(rows * width),
            mean: Some(self.view_as(DType::F32, rows)),
            rstd: self.view_as(DType::F32, rows),
            rows,
            width,
            eps: 1e-5,
        };
        self.time("norm forward", count, Cost::Bytes(4 * bytes), move |b| b.norm_forward(C, forward));
        let scratch = self.backend.norm_backward_scratch(rows, width).0 as usize / 4;
        let backward = NormBackward {
            kind: NormKind::Layer,
            x: forward.x,
            weight: forward.weight,
            mean: forward.mean,
            rstd: forward.rstd,
            dy: forward.y,
            carry: forward.residual,
            dx: self.view(rows * width),
            dweight: self.view_as(DType::F32, width),
            dbias: Some(self.view_as(DType::F32, width)),
            scratch: self.room(DType::F32, scratch),
            rows,
            width,
        };
        self.time("norm backward", count, Cost::Bytes(4 * bytes), move |b| b.norm_backward(C, backward));
    }

    fn attention(&mut self, m: Model) {
        let shape = AttentionShape {
            batch: m.batch,
            seq: m.seq,
            heads: m.heads,
            kv_heads: m.heads,
            head_dim: m.width / m.heads,
        };
        let rows = m.batch * m.seq;
        let scratch = self.backend.attention_scratch(shape, self.dtype).0 as usize / 4;
        let forward = Attention {
            qkv: self.view(rows * shape.packed_width()),
            starts: self.ints(std::iter::repeat_n(0, rows)),
            out: self.view(rows * m.width),
            lse: self.view_as(DType::F32, m.heads * rows),
            scratch: self.room(DType::F32, scratch),
            shape,
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
        };
        // Half of the scores are masked; two products forward, five backward.
        let product = rows * m.seq * m.width;
        self.time("attention forward", m.layers, Cost::Flops(2 * product), move |b| b.attention_forward(C, forward));
        let backward = AttentionBackward { forward, dout: self.view(rows * m.width), dqkv: self.view(forward.qkv.len) };
        self.time("attention backward", m.layers, Cost::Flops(5 * product), move |b| b.attention_backward(C, backward));
    }

    fn gelu(&mut self, m: Model) {
        let len = 4 * m.batch * m.seq * m.width;
        let bytes = self.dtype.size() * len;
        let (x, y) = (self.view(len), self.view(len));
        self.time("gelu forward", m.layers, Cost::Bytes(2 * bytes), move |b| b.gelu_forward(C, x, y));
        self.time("gelu backward", m.layers, Cost::Bytes(3 * bytes), move |b| b.gelu_backward(C, x, y, y));
    }

    fn ends(&mut self, m: Model) {
        let rows = m.batch * m.seq;
        let token = move |i: usize| (i * 7919 % m.vocabulary) as i32;
        let tokens = self.ints((0..rows).map(token));
        let starts = self.ints(std::iter::repeat_n(0, rows));
        let y = self.view(rows * m.width);
        let bytes = || Cost::Bytes(2 * y.bytes() as usize);
        let args = |table, positions| Embedding {
            tokens,
            starts,
            table,
            positions: Some(positions),
            seq: m.seq,
            width: m.width,
        };
        let forward = args(self.view(m.vocabulary * m.width), self.view(m.seq * m.width));
        self.time("embedding forward", 1, bytes(), move |b| b.embedding_forward(C, forward, y));
        let backward =
            args(self.view_as(DType::F32, m.vocabulary * m.width), self.view_as(DType::F32, m.seq * m.width));
        self.time("embedding backward", 1, bytes(), move |b| b.embedding_backward(C, backward, y));
        let loss = CrossEntropy {
            logits: self.view(rows * m.vocabulary),
            targets: tokens,
            loss: self.room(DType::F64, 1),
            row_losses: self.room(DType::F32, rows),
            scale: self.view_as(DType::F32, 1),
            factor: 1.0 / rows as f32,
            rows,
            vocabulary: m.vocabulary,
            backward: true,
        };
        let bytes = Cost::Bytes(2 * loss.logits.bytes() as usize);
        self.time("cross-entropy", 1, bytes, move |b| b.cross_entropy(C, loss));
    }

    fn optimizer(&mut self, m: Model) {
        let layer = 12 * m.width * m.width + 13 * m.width;
        let half = self.dtype != DType::F32;
        let scalars = self.view_as(DType::F32, ScalarSlot::COUNT);
        let run = AdamRun {
            master: self.view_as(DType::F32, layer),
            m: self.view_as(DType::F32, layer),
            v: self.view_as(DType::F32, layer),
            grad: self.view_as(DType::F32, layer),
            weight: half.then(|| self.view(layer)),
            weight_decay: 0.1,
            rounding: RoundingKey::default(),
        };
        let partials = self.room(DType::F64, m.layers);
        self.time("norm partial, a layer", m.layers, Cost::Bytes(4 * layer), move |b| {
            b.norm_partial(C, &[NormRun { src: run.grad, partial: partials.slice(0, 1) }])
        });
        self.time("fill gradients, a layer", m.layers, Cost::Bytes(4 * layer), move |b| b.fill(C, run.grad, 1e-3));
        self.time("adamw, a layer", m.layers, Cost::Bytes(28 * layer), move |b| {
            b.adamw(C, &AdamW { runs: &[run], scalars, beta1: 0.9, beta2: 0.95, eps: 1e-8 })
        });
        let decide = StepScalars {
            partials,
            shards: 1,
            row: m.layers,
            units: m.layers,
            scalars,
            learning_rate: self.view_as(DType::F32, 1),
            clip: 1.0,
            beta1: 0.9,
            beta2: 0.95,
            scaling: None,
        };
        self.time("step scalars", 1, Cost::Bytes(64), move |b| b.step_scalars(C, decide));
    }

    fn model(&mut self, m: Model) {
        println!("{} {} ({} tokens a step)", self.backend.name(), m.name, m.batch * m.seq);
        let (rows, w) = (m.batch * m.seq, m.width);
        self.step = 0.0;
        for (name, from, to) in [("qkv", w, 3 * w), ("proj", w, w), ("fc", w, 4 * w), ("out", 4 * w, w)] {
            self.linear(name, m.layers, rows, from, to);
            self.next = 0;
        }
        self.linear("logits", 1, rows, w, m.vocabulary);
        for part in [Self::norms, Self::attention, Self::gelu, Self::ends, Self::optimizer] {
            self.next = 0;
            part(self, m);
        }
        println!("{:28} {:47.2} ms a step", "all", self.step * 1e3);
    }
}

fn matmul(a: View, b: View, d: View, [m, n, k]: [usize; 3], [transpose_a, transpose_b]: [bool; 2]) -> Matmul {
    Matmul { a, b, d, m, n, k, transpose_a, transpose_b, bias: None, residual: None, accumulate: false }
}

fn main() -> Result<(), String> {
    let (mut models, mut threads, mut dtype, mut repeats) = (Vec::new(), Vec::new(), DType::F32, 20);
    let mut only = String::new();
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("{name} needs a value"))?;
        let bad = || format!("{name} {value}: unknown; see the head of examples/op_bench.rs");
        match name.as_str() {
            "--model" => models.push(MODELS.into_iter().find(|m| m.name == value).ok_or_else(bad)?),
            "--threads" => threads.push(value.parse().map_err(|_| bad())?),
            "--repeats" => repeats = value.parse().map_err(|_| bad())?,
            "--only" => only = value,
            "--dtype" => {
                let types = [("fp32", DType::F32), ("bf16", DType::Bf16), ("fp16", DType::F16)];
                dtype = types.into_iter().find(|(n, _)| *n == value).ok_or_else(bad)?.1;
            }
            _ => return Err(bad()),
        }
    }
    for threads in if threads.is_empty() { vec![1, 2] } else { threads } {
        let mut bench = Bench::new(threads, dtype, repeats, &only)?;
        bench.ceilings();
        for model in if models.is_empty() { MODELS.to_vec() } else { models.clone() } {
            bench.model(model);
        }
    }
    Ok(())
}
