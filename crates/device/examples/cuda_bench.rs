//! Speed of each operation on a GPU, beside the time that its bytes or its arithmetic take at the machine's ceilings.
//!
//! `cuda_bench [--model gpt2|llama]... [--dtype bf16|fp16|fp32] [--only PART-OF-A-NAME]`
//!
//! The first lines are the ceilings, measured here: one large matrix product and one large copy. Then one line per operation:
//! times it occurs in a training step, microseconds for one (best of five runs of several), the floor in microseconds, the
//! ratio, and milliseconds in the step. The last line is the tokens per second that these operations alone allow.

use std::time::Instant;

use gpurun_device::{
    AdamRun, AdamW, Attention, AttentionBackward, AttentionShape, Backend, CrossEntropy, CudaBackend, CudnnAttention,
    Embedding, Matmul, NormBackward, NormForward, NormKind, NormRun, Rope, RoundingKey, ScalarSlot, ScratchSizes,
};
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

const C: Lane = Lane::Compute;
const ARENA: u64 = 24 << 30;
const POOL: usize = 16 << 20;

/// Sizes of a model and its micro-batch.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    llama: bool,
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    ff: usize,
    vocabulary: usize,
    batch: usize,
    seq: usize,
}

const MODELS: [Model; 2] = [
    Model {
        name: "gpt2",
        llama: false,
        layers: 12,
        width: 768,
        heads: 12,
        kv_heads: 12,
        ff: 3072,
        vocabulary: 50304,
        batch: 32,
        seq: 1024,
    },
    Model {
        name: "llama",
        llama: true,
        layers: 16,
        width: 2048,
        heads: 32,
        kv_heads: 8,
        ff: 8192,
        vocabulary: 32000,
        batch: 8,
        seq: 2048,
    },
];

/// What one run of an operation must do at least.
#[derive(Clone, Copy)]
enum Cost {
    Flops(f64),
    Bytes(f64),
}

struct Bench {
    backend: CudaBackend,
    arena: ArenaId,
    next: u64,
    dtype: DType,
    only: String,
    pool: View,
    floating: u64,
    flops: f64,
    bytes: f64,
    step: f64,
}

impl Bench {
    fn new(dtype: DType, only: String) -> Result<Self, String> {
        let backend = CudaBackend::new(0, 4).map_err(|e| e.to_string())?;
        let arena = backend.allocate(Place::Device, Bytes(ARENA)).map_err(|e| e.to_string())?;
        let pool = View { arena, offset: 0, len: POOL, dtype };
        let mut this = Self {
            backend,
            arena,
            next: pool.bytes(),
            dtype,
            only,
            pool,
            floating: 0,
            flops: 0.0,
            bytes: 0.0,
            step: 0.0,
        };
        let wide = this.room(DType::F32, POOL);
        let mut state = 1u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        // About normal: a product of zeros would run faster than real data.
        let values: Vec<u8> = (0..POOL).flat_map(|_| (uniform() + uniform() + uniform()).to_le_bytes()).collect();
        this.backend.upload(&values, wide).map_err(|e| e.to_string())?;
        this.backend.cast(C, wide, pool).map_err(|e| e.to_string())?;
        this.floating = pool.bytes();
        this.next = this.floating;
        Ok(this)
    }

    fn room(&mut self, dtype: DType, len: usize) -> View {
        let view = View { arena: self.arena, offset: self.next, len, dtype };
        self.next = (self.next + view.bytes()).next_multiple_of(256);
        assert!(self.next <= ARENA, "the sizes need a larger arena");
        view
    }

    /// A view of random values of the storage type.
    fn random(&mut self, len: usize) -> View {
        let view = self.room(self.dtype, len);
        for start in (0..len).step_by(POOL) {
            let part = POOL.min(len - start);
            self.backend.copy(C, self.pool.slice(0, part), view.slice(start, part)).expect("within the views");
        }
        view
    }

    fn wide(&mut self, len: usize) -> View {
        let view = self.room(DType::F32, len);
        self.backend.fill(C, view, 0.01).expect("a view of the arena");
        view
    }

    fn ints(&mut self, len: usize, below: i32) -> View {
        let view = self.room(DType::I32, len);
        let mut state = 7u32;
        let bytes: Vec<u8> = (0..len)
            .flat_map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as i32 % below).to_le_bytes()
            })
            .collect();
        self.backend.upload(&bytes, view).expect("a view of that length");
        view
    }

    /// Seconds for one run: best of five batches.
    fn time(&self, run: &dyn Fn(&CudaBackend)) -> f64 {
        let batch = |times: usize| {
            let start = Instant::now();
            for _ in 0..times {
                run(&self.backend);
            }
            self.backend.synchronize(C).expect("the operation succeeds");
            start.elapsed().as_secs_f64() / times as f64
        };
        batch(1);
        let once = batch(2).max(1e-6);
        let times = ((0.02 / once) as usize).clamp(3, 300);
        (0..5).map(|_| batch(times)).fold(f64::INFINITY, f64::min)
    }

    /// Measures, prints and adds up one operation, and frees its views.
    fn row(&mut self, name: &str, count: usize, cost: Cost, run: impl Fn(&CudaBackend)) {
        if name.contains(&self.only) {
            let seconds = self.time(&run);
            let (floor, rate) = match cost {
                Cost::Flops(n) => (n / self.flops, format!("{:7.0} TFLOP/s", n / seconds / 1e12)),
                Cost::Bytes(n) => (n / self.bytes, format!("{:7.0} GB/s", n / seconds / 1e9)),
            };
            let total = seconds * count as f64 * 1e3;
            self.step += total;
            println!(
                "{name:24} x{count:3} {:9.1} us  floor {:9.1} us  {:5.2}  {total:8.3} ms  {rate}",
                seconds * 1e6,
                floor * 1e6,
                seconds / floor
            );
        }
        self.next = self.floating;
    }

    fn ceilings(&mut self) {
        let n = 8192;
        let (a, b, d) = (self.random(n * n), self.random(n * n), self.room(self.dtype, n * n));
        let args = matmul(a, b, d, [n, n, n], [false, true]);
        let seconds = self.time(&|backend| backend.matmul(C, args).expect("matmul"));
        self.flops = 2.0 * (n as f64).powi(3) / seconds;
        let (src, dst) = (self.random(1 << 30), self.room(self.dtype, 1 << 30));
        let seconds = self.time(&|backend| backend.copy(C, src, dst).expect("copy"));
        self.bytes = 2.0 * src.bytes() as f64 / seconds;
        println!("ceilings: {:.0} TFLOP/s in {}, {:.0} GB/s", self.flops / 1e12, self.dtype, self.bytes / 1e9);
        self.next = self.floating;
    }
}

fn matmul(a: View, b: View, d: View, [m, n, k]: [usize; 3], [transpose_a, transpose_b]: [bool; 2]) -> Matmul {
    Matmul { a, b, d, m, n, k, transpose_a, transpose_b, bias: None, residual: None, accumulate: false }
}

impl Bench {
    /// Forward, gradient of the input and gradient of the weight of one linear layer.
    fn linear(&mut self, name: &str, count: usize, rows: usize, inputs: usize, outputs: usize, biased: bool) {
        let cost = Cost::Flops(2.0 * (rows * inputs * outputs) as f64);
        let (x, w, y) = (self.random(rows * inputs), self.random(inputs * outputs), self.random(rows * outputs));
        let bias = biased.then(|| self.random(outputs));
        let forward = Matmul { bias, ..matmul(x, w, y, [rows, outputs, inputs], [false, true]) };
        self.row(&format!("{name} forward"), count, cost, |b| b.matmul(C, forward).expect("matmul"));
        let (dx, w, dy) = (self.random(rows * inputs), self.random(inputs * outputs), self.random(rows * outputs));
        let gradient = matmul(dy, w, dx, [rows, inputs, outputs], [false, false]);
        self.row(&format!("{name} dx"), count, cost, |b| b.matmul(C, gradient).expect("matmul"));
        let (x, dw, dy) = (self.random(rows * inputs), self.wide(inputs * outputs), self.random(rows * outputs));
        let gradient = Matmul { accumulate: true, ..matmul(dy, x, dw, [outputs, inputs, rows], [true, false]) };
        self.row(&format!("{name} dw"), count, cost, |b| b.matmul(C, gradient).expect("matmul"));
        if biased {
            let (dy, grad) = (self.random(rows * outputs), self.wide(outputs));
            let bytes = Cost::Bytes(dy.bytes() as f64);
            self.row(&format!("{name} bias_grad"), count, bytes, |b| {
                b.bias_grad(C, dy, grad, rows, outputs).expect("bias_grad");
            });
        }
    }

    fn attention(&mut self, model: Model) {
        let Model { batch, seq, heads, kv_heads, width, .. } = model;
        let shape = AttentionShape { batch, seq, heads, kv_heads, head_dim: width / heads };
        let rows = batch * seq;
        let starts = self.ints(rows, 1);
        let scratch = self.backend.attention_scratch(shape, self.dtype);
        let args = Attention {
            qkv: self.random(rows * shape.packed_width()),
            starts,
            out: self.random(rows * width),
            lse: self.wide(batch * heads * seq),
            scratch: self.room(DType::F32, scratch.0.div_ceil(4) as usize),
            shape,
            scale: (shape.head_dim as f32).sqrt().recip(),
        };
        let backward = AttentionBackward {
            forward: args,
            dout: self.random(rows * width),
            dqkv: self.random(rows * shape.packed_width()),
        };
        // Causal: half of the scores.
        let flops = 2.0 * (rows * seq * width) as f64;
        self.backend.whole_documents(true);
        let held = self.next;
        for (name, mode, count) in [
            ("attention", CudnnAttention::Off, model.layers),
            ("cudnn", CudnnAttention::Deterministic, 0),
            ("cudnn fastest", CudnnAttention::Fastest, 0),
        ] {
            self.backend.set_cudnn_attention(mode);
            let before = self.backend.cudnn_plans();
            self.row(&format!("{name} forward"), count, Cost::Flops(flops), |b| {
                b.attention_forward(C, args).expect("attention");
            });
            self.next = held;
            self.row(&format!("{name} backward"), count, Cost::Flops(2.5 * flops), |b| {
                b.attention_backward(C, backward).expect("attention");
            });
            self.next = held;
            println!("  {} new cuDNN plans", self.backend.cudnn_plans() - before);
        }
        self.backend.set_cudnn_attention(CudnnAttention::default());
        self.backend.whole_documents(false);
        self.next = self.floating;
    }

    fn norms(&mut self, model: Model) {
        let (rows, width) = (model.batch * model.seq, model.width);
        let n = rows * width;
        let kind = if model.llama { NormKind::Rms } else { NormKind::Layer };
        let layer = kind == NormKind::Layer;
        let size = self.dtype.size() as f64;
        let args = NormForward {
            kind,
            x: self.random(n),
            residual: Some(self.random(n)),
            sum: Some(self.random(n)),
            weight: self.random(width),
            bias: layer.then(|| self.random(width)),
            y: self.random(n),
            mean: layer.then(|| self.wide(rows)),
            rstd: self.wide(rows),
            rows,
            width,
            eps: 1e-5,
        };
        let count = 2 * model.layers + 1;
        self.row("norm forward", count, Cost::Bytes(4.0 * n as f64 * size), |b| b.norm_forward(C, args).expect("norm"));
        let scratch = self.backend.norm_backward_scratch(rows, width);
        let args = NormBackward {
            kind,
            x: self.random(n),
            weight: self.random(width),
            mean: layer.then(|| self.wide(rows)),
            rstd: self.wide(rows),
            dy: self.random(n),
            carry: Some(self.random(n)),
            dx: self.random(n),
            dweight: self.wide(width),
            dbias: layer.then(|| self.wide(width)),
            scratch: self.room(DType::F32, scratch.0.div_ceil(4) as usize),
            rows,
            width,
        };
        self.row("norm backward", count, Cost::Bytes(4.0 * n as f64 * size), |b| {
            b.norm_backward(C, args).expect("norm");
        });
    }

    fn activations(&mut self, model: Model) {
        let rows = model.batch * model.seq;
        let (n, size, layers) = (rows * model.ff, self.dtype.size() as f64, model.layers);
        if model.llama {
            let (x, y) = (self.random(2 * n), self.random(n));
            self.row("swiglu forward", layers, Cost::Bytes(3.0 * n as f64 * size), |b| {
                b.swiglu_forward(C, x, y, rows, model.ff).expect("swiglu");
            });
            let (x, dy, dx) = (self.random(2 * n), self.random(n), self.random(2 * n));
            self.row("swiglu backward", layers, Cost::Bytes(5.0 * n as f64 * size), |b| {
                b.swiglu_backward(C, x, dy, dx, rows, model.ff).expect("swiglu");
            });
            let head_dim = model.width / model.heads;
            let stride = (model.heads + 2 * model.kv_heads) * head_dim;
            let heads = model.heads + model.kv_heads;
            let args = Rope {
                x: self.random(rows * stride),
                starts: self.ints(rows, 1),
                rows,
                seq: model.seq,
                heads,
                head_dim,
                stride,
                theta: 500_000.0,
                scaling: None,
                inverse: false,
            };
            let bytes = 2.0 * (rows * heads * head_dim) as f64 * size;
            self.row("rope", 2 * layers, Cost::Bytes(bytes), |b| b.rope(C, args).expect("rope"));
        } else {
            let (x, y) = (self.random(n), self.random(n));
            self.row("gelu forward", layers, Cost::Bytes(2.0 * n as f64 * size), |b| {
                b.gelu_forward(C, x, y).expect("gelu");
            });
            let (x, dy) = (self.random(n), self.random(n));
            self.row("gelu backward", layers, Cost::Bytes(3.0 * n as f64 * size), |b| {
                b.gelu_backward(C, x, dy, dy).expect("gelu");
            });
        }
    }

    /// Embedding, and the head over chunks of rows that stay within the budget.
    fn ends(&mut self, model: Model) {
        let Model { width, vocabulary, seq, .. } = model;
        let (rows, size) = (model.batch * seq, self.dtype.size() as f64);
        let budget = self.backend.logits_budget().0 as usize / (vocabulary * self.dtype.size());
        let chunk = budget.next_power_of_two().min(rows) / if budget.is_power_of_two() { 1 } else { 2 };
        self.linear("head", rows / chunk, chunk, width, vocabulary, false);
        let args = CrossEntropy {
            logits: self.random(chunk * vocabulary),
            targets: self.ints(chunk, vocabulary as i32),
            loss: self.room(DType::F64, 1),
            row_losses: self.wide(chunk),
            scale: self.wide(1),
            factor: 1.0,
            rows: chunk,
            vocabulary,
            backward: true,
        };
        let bytes = 2.0 * (chunk * vocabulary) as f64 * size;
        self.row("cross_entropy", rows / chunk, Cost::Bytes(bytes), |b| {
            b.cross_entropy(C, args).expect("cross_entropy");
        });
        let positional = !model.llama;
        let args = Embedding {
            tokens: self.ints(rows, vocabulary as i32),
            starts: self.ints(rows, 1),
            table: self.random(vocabulary * width),
            positions: positional.then(|| self.random(seq * width)),
            seq,
            width,
        };
        let y = self.random(rows * width);
        self.row("embedding forward", 1, Cost::Bytes(2.0 * y.bytes() as f64), |b| {
            b.embedding_forward(C, args, y).expect("embedding");
        });
        let args = Embedding {
            tokens: self.ints(rows, vocabulary as i32),
            starts: self.ints(rows, 1),
            table: self.wide(vocabulary * width),
            positions: positional.then(|| self.wide(seq * width)),
            seq,
            width,
        };
        let dy = self.random(rows * width);
        // Rows that occur are read and written.
        let touched = 8.0 * (rows.min(vocabulary) * width) as f64;
        self.row("embedding backward", 1, Cost::Bytes(dy.bytes() as f64 + touched), |b| {
            b.embedding_backward(C, args, dy).expect("embedding");
        });
    }

    fn optimizer(&mut self, model: Model) {
        let Model { layers, width, ff, vocabulary, heads, kv_heads, .. } = model;
        let qkv = width * width / heads * (heads + 2 * kv_heads);
        let unit = qkv + width * width + if model.llama { 3 * width * ff } else { 2 * width * ff };
        for (name, count, n) in [("block", layers, unit), ("table", 1, vocabulary * width)] {
            let mut state = [0f32; ScalarSlot::COUNT];
            state[ScalarSlot::GradFactor as usize] = 1.0;
            state[ScalarSlot::BiasCorrection1 as usize] = 0.1;
            state[ScalarSlot::BiasCorrection2Sqrt as usize] = 0.1;
            let scalars = self.room(DType::F32, ScalarSlot::COUNT);
            self.backend.upload(&state.map(f32::to_le_bytes).concat(), scalars).expect("a view of that length");
            let run = AdamRun {
                master: self.wide(n),
                m: self.wide(n),
                v: self.wide(n),
                grad: self.wide(n),
                weight: Some(self.random(n)),
                weight_decay: 0.1,
                rounding: RoundingKey::default(),
            };
            let held = self.next;
            self.row(
                &format!("adamw {name}"),
                count,
                Cost::Bytes(28.0 * n as f64 + run.weight.map_or(0, View::bytes) as f64),
                |b| {
                    let args = AdamW { runs: &[run], scalars, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
                    b.adamw(C, &args).expect("adamw");
                },
            );
            self.next = held;
            let partial = self.room(DType::F64, 1);
            self.row(&format!("norm_partial {name}"), count, Cost::Bytes(4.0 * n as f64), |b| {
                b.norm_partial(C, &[NormRun { src: run.grad, partial }]).expect("norm_partial");
            });
        }
    }

    fn model(&mut self, model: Model) {
        let Model { layers, width, heads, kv_heads, ff, .. } = model;
        let rows = model.batch * model.seq;
        let biased = !model.llama;
        self.step = 0.0;
        println!("{} b{} s{} {}", model.name, model.batch, model.seq, self.dtype);
        self.linear("qkv", layers, rows, width, width / heads * (heads + 2 * kv_heads), biased);
        self.linear("proj", layers, rows, width, width, biased);
        self.linear("up", layers, rows, width, if model.llama { 2 * ff } else { ff }, biased);
        self.linear("down", layers, rows, ff, width, biased);
        self.attention(model);
        self.norms(model);
        self.activations(model);
        self.ends(model);
        self.optimizer(model);
        println!("{:24} {:8.2} ms a step, {:.0} tokens/s\n", "sum", self.step, rows as f64 / self.step * 1e3);
    }
}

fn options() -> Result<(Vec<Model>, DType, String), String> {
    let (mut models, mut dtype, mut only) = (Vec::new(), DType::Bf16, String::new());
    let mut args = std::env::args().skip(1);
    while let Some(option) = args.next() {
        let value = args.next().ok_or_else(|| format!("{option} needs a value"))?;
        match option.as_str() {
            "--model" => match MODELS.iter().find(|m| m.name == value) {
                Some(model) => models.push(*model),
                None => return Err(format!("--model {value}: there are gpt2 and llama")),
            },
            "--dtype" => {
                dtype = match value.as_str() {
                    "bf16" => DType::Bf16,
                    "fp16" => DType::F16,
                    "fp32" => DType::F32,
                    _ => return Err(format!("--dtype {value}: there are bf16, fp16 and fp32")),
                }
            }
            "--only" => only = value,
            _ => return Err(format!("{option}: there are --model, --dtype and --only")),
        }
    }
    if models.is_empty() {
        models.extend(MODELS);
    }
    Ok((models, dtype, only))
}

fn main() -> Result<(), String> {
    let (models, dtype, only) = options()?;
    let mut bench = Bench::new(dtype, only)?;
    println!("{}", bench.backend.name());
    bench.ceilings();
    for model in models {
        bench.model(model);
    }
    Ok(())
}
