use gpurun_device::{CrossEntropy, DeviceError, Matmul, ScratchSizes};
use gpurun_types::{DType, View};

use crate::layers::{BackwardIo, Layer, Norm};
use crate::{BatchShape, Cx, Init, Mode, Param, Tensor, Unit};

/// Last unit of the chain: norm, logits over the vocabulary, cross-entropy.
///
/// Works on chunks of rows, so that logits and their gradient, which share one scratch tensor, stay within
/// [`ScratchSizes::logits_budget`]. Nothing is saved: the backward computes loss and gradients of a chunk in one go.
pub struct LossHead {
    name: String,
    norm: Norm,
    table: Table,
    width: usize,
    vocabulary: usize,
}

/// The `[vocabulary, width]` matrix.
enum Table {
    Own { name: String, std: f32 },
    Borrowed { name: String },
}

/// Views of the scratch, in order.
struct Scratch<'a> {
    logits: View,
    normed: View,
    row_losses: View,
    workspace: View,
    stats: &'a [View],
}

/// One run of rows.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    rows: usize,
}

impl LossHead {
    /// With a matrix of its own, `{table}.weight`, normal with deviation `std`.
    #[must_use]
    pub fn new(name: &str, norm: Norm, table: &str, vocabulary: usize, std: f32) -> Self {
        let table = Table::Own { name: format!("{table}.weight"), std };
        Self { name: name.to_owned(), width: norm.input_width(), norm, table, vocabulary }
    }

    /// With the matrix that another unit owns under the full name `table` (tied embeddings, Press & Wolf 2017).
    #[must_use]
    pub fn tied(name: &str, norm: Norm, table: &str, vocabulary: usize) -> Self {
        let table = Table::Borrowed { name: table.to_owned() };
        Self { name: name.to_owned(), width: norm.input_width(), norm, table, vocabulary }
    }

    /// Rows of a chunk: as few chunks as the budget allows, equal but for the last, a multiple of 64 rows.
    fn chunk_rows(&self, sizes: &dyn ScratchSizes, rows: usize, dtype: DType) -> usize {
        let budget = sizes.logits_budget().0.max(1);
        let chunks = dtype.bytes(rows * self.vocabulary).0.div_ceil(budget).max(1) as usize;
        rows.div_ceil(chunks).next_multiple_of(64).min(rows)
    }

    fn scratch_views<'a>(&self, cx: &Cx<'a>) -> Scratch<'a> {
        let s = cx.scratch;
        Scratch { logits: s[0], normed: s[1], row_losses: s[2], workspace: s[3], stats: &s[4..] }
    }

    fn chunks(&self, cx: &Cx<'_>) -> impl Iterator<Item = Chunk> + use<> {
        let rows = cx.shape.tokens();
        let most = cx.scratch[0].len / self.vocabulary;
        (0..rows).step_by(most).map(move |start| Chunk { start, rows: most.min(rows - start) })
    }

    /// `logits = norm(x) · tableᵀ` for the rows of one chunk of `x`.
    fn project(&self, cx: &Cx<'_>, weights: &[View], x: View, logits: View, rows: usize) -> Result<View, DeviceError> {
        let scratch = self.scratch_views(cx);
        let normed = scratch.normed.slice(0, rows * self.width);
        let (table, norm) = weights.split_last().expect("the table comes last");
        let stats: Vec<View> = scratch.stats.iter().map(|s| s.slice(0, rows)).collect();
        self.norm.forward_rows(cx, norm, x, normed, &stats, rows)?;
        cx.backend
            .matmul(cx.lane, self.product(normed, *table, logits, [rows, self.vocabulary, self.width], false, true))?;
        Ok(normed)
    }

    fn product(
        &self,
        a: View,
        b: View,
        d: View,
        [m, n, k]: [usize; 3],
        transpose_a: bool,
        transpose_b: bool,
    ) -> Matmul {
        Matmul { a, b, d, m, n, k, transpose_a, transpose_b, bias: None, residual: None, accumulate: false }
    }

    fn cross_entropy(&self, cx: &Cx<'_>, chunk: Chunk, logits: View, backward: bool) -> Result<(), DeviceError> {
        cx.backend.cross_entropy(
            cx.lane,
            CrossEntropy {
                logits,
                targets: cx.targets.slice(chunk.start, chunk.rows),
                loss: cx.loss,
                row_losses: self.scratch_views(cx).row_losses.slice(0, chunk.rows),
                scale: cx.loss_scale,
                factor: cx.loss_factor,
                rows: chunk.rows,
                vocabulary: self.vocabulary,
                backward,
            },
        )
    }

    fn backward_chunk(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: View,
        dx: View,
        chunk: Chunk,
    ) -> Result<(), DeviceError> {
        let Chunk { start, rows } = chunk;
        let of = |view: View| view.slice(start * self.width, rows * self.width);
        let (x, dx) = (of(x), of(dx));
        let scratch = self.scratch_views(cx);
        let logits = scratch.logits.slice(0, rows * self.vocabulary);
        let normed = self.project(cx, weights, x, logits, rows)?;
        self.cross_entropy(cx, chunk, logits, true)?;
        let (table, norm_weights) = weights.split_last().expect("the table comes last");
        let (dtable, norm_grads) = grads.split_last().expect("the table comes last");
        let dtable = self.product(logits, normed, *dtable, [self.vocabulary, self.width, rows], true, false);
        cx.backend.matmul(cx.lane, Matmul { accumulate: true, ..dtable })?;
        let dnormed = self.product(logits, *table, dx, [rows, self.width, self.vocabulary], false, false);
        cx.backend.matmul(cx.lane, dnormed)?;
        let stats: Vec<View> = scratch.stats.iter().map(|s| s.slice(0, rows)).collect();
        let io = BackwardIo { weights: norm_weights, grads: norm_grads, x, dy: dx, dx, carry: None, saved: &stats };
        self.norm.backward_rows(cx, io, scratch.workspace, rows)
    }
}

impl Unit for LossHead {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<Param> {
        let mut params = self.norm.params();
        if let Table::Own { name, std } = &self.table {
            params.push(Param {
                name: name.clone(),
                shape: vec![self.vocabulary, self.width],
                init: Init::Normal { std: *std },
                decay: true,
            });
        }
        params
    }

    fn borrows(&self) -> Vec<String> {
        match &self.table {
            Table::Own { .. } => Vec::new(),
            Table::Borrowed { name } => vec![name.clone()],
        }
    }

    fn input_width(&self) -> usize {
        self.width
    }

    fn output_width(&self) -> usize {
        0
    }

    fn saved(&self, _shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        Vec::new()
    }

    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        let rows = self.chunk_rows(sizes, shape.tokens(), dtype);
        let mut scratch = vec![
            Tensor { name: "logits", elements: rows * self.vocabulary, dtype },
            Tensor { name: "normed", elements: rows * self.width, dtype },
            Tensor { name: "row losses", elements: rows, dtype: DType::F32 },
            self.norm.workspace(sizes, rows),
        ];
        scratch.extend(self.norm.stats(rows));
        scratch
    }

    fn forward_flops_per_token(&self, _seq: usize) -> f64 {
        2.0 * self.width as f64 * self.vocabulary as f64
    }

    fn forward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        x: Option<View>,
        _y: Option<View>,
        _saved: &[View],
    ) -> Result<(), DeviceError> {
        assert_eq!(cx.mode, Mode::Evaluate, "in training the loss is computed by the backward");
        let x = x.expect("the loss unit has an input");
        for chunk in self.chunks(cx) {
            let logits = self.scratch_views(cx).logits.slice(0, chunk.rows * self.vocabulary);
            let rows = x.slice(chunk.start * self.width, chunk.rows * self.width);
            self.project(cx, weights, rows, logits, chunk.rows)?;
            self.cross_entropy(cx, chunk, logits, false)?;
        }
        Ok(())
    }

    fn backward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        grads: &[View],
        x: Option<View>,
        _dy: Option<View>,
        dx: Option<View>,
        _saved: &[View],
    ) -> Result<(), DeviceError> {
        let x = x.expect("the loss unit has an input");
        let dx = dx.expect("the loss unit has an input");
        self.chunks(cx).try_for_each(|chunk| self.backward_chunk(cx, weights, grads, x, dx, chunk))
    }

    fn logits(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        x: View,
        row: usize,
        logits: View,
        _saved: &[View],
    ) -> Result<(), DeviceError> {
        self.project(cx, weights, x.slice(row * self.width, self.width), logits, 1).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use gpurun_device::{AttentionShape, Backend, CpuBackend};
    use gpurun_types::{Bytes, Lane};

    use super::*;
    use crate::reference::{Batch, Inputs, UnitMemory, allocate, read, write};

    const VOCABULARY: usize = 13;
    const WIDTH: usize = 8;

    fn head() -> LossHead {
        LossHead::new("head", Norm::layer("n", WIDTH, 1e-5), "table", VOCABULARY, 0.5)
    }

    /// Loss of a training pass and of an evaluation, `dx` and the gradients, in chunks of `rows` of 12 rows.
    fn run(rows: usize) -> (f64, f64, Vec<Vec<f32>>) {
        let (backend, head) = (CpuBackend::new(1).unwrap(), head());
        let backend: &dyn Backend = &backend;
        let shape = BatchShape { batch: 2, seq: 6 };
        let memory = UnitMemory::new(backend, &head, BatchShape { batch: 1, seq: rows }, DType::F32).unwrap();
        assert_eq!(memory.scratch[0].len, rows * VOCABULARY);
        for (param, &view) in head.params().iter().zip(&memory.weights) {
            let mut values = vec![0.0; view.len];
            crate::init::fill(5, &param.name, param.init, 0, &mut values);
            write(backend, &values, view).unwrap();
        }
        let edge = || allocate(backend, shape.tokens() * WIDTH, DType::F32).unwrap();
        let (x, dx) = (edge(), edge());
        let mut values = vec![0.0; x.len];
        crate::init::fill(5, "x", Init::Normal { std: 1.0 }, 0, &mut values);
        write(backend, &values, x).unwrap();
        let inputs = Inputs::new(backend, shape).unwrap();
        let targets = (0..12).map(|i| if i % 6 == 5 { -1 } else { i }).collect();
        let batch = Batch { tokens: vec![0; 12], starts: vec![0; 12], targets };
        let pass = |mode| {
            inputs.load(backend, &batch, 1.0).unwrap();
            let cx = inputs.cx(backend, shape, DType::F32, mode, 0.1, &memory.scratch);
            match mode {
                Mode::Train => {
                    head.backward(&cx, &memory.weights, &memory.grads, Some(x), None, Some(dx), &[]).unwrap();
                }
                Mode::Evaluate => head.forward(&cx, &memory.weights, Some(x), None, &[]).unwrap(),
            }
            backend.synchronize(Lane::Compute).unwrap();
            inputs.loss(backend).unwrap()
        };
        let losses = (pass(Mode::Train), pass(Mode::Evaluate));
        let tensors = memory.grads.iter().chain([&dx]).map(|&v| read(backend, v).unwrap()).collect();
        (losses.0, losses.1, tensors)
    }

    #[test]
    fn chunks_of_any_size_give_the_same_loss_and_gradients() {
        let _limit = testkit::time_limit(10);
        let (loss, evaluated, whole) = run(12);
        assert!((loss - evaluated).abs() < 1e-6 * loss, "{loss} {evaluated}");
        assert!(whole.iter().all(|tensor| tensor.iter().any(|g| *g != 0.0)));
        for rows in [1, 5, 6, 11] {
            let (chunked, evaluated, tensors) = run(rows);
            assert!((chunked - loss).abs() < 1e-6 * loss && (evaluated - loss).abs() < 1e-6 * loss, "chunks of {rows}");
            for (a, b) in whole.iter().flatten().zip(tensors.iter().flatten()) {
                assert!((a - b).abs() < 1e-6, "chunks of {rows}: {a} {b}");
            }
        }
    }

    struct Budget(u64);

    impl ScratchSizes for Budget {
        fn norm_backward_scratch(&self, _rows: usize, _width: usize) -> Bytes {
            Bytes(0)
        }
        fn attention_scratch(&self, _shape: AttentionShape, _dtype: DType) -> Bytes {
            Bytes(0)
        }
        fn logits_budget(&self) -> Bytes {
            Bytes(self.0)
        }
    }

    #[test]
    fn logits_stay_within_the_budget_in_chunks_of_equal_size() {
        let _limit = testkit::time_limit(10);
        let head = LossHead::new("head", Norm::rms("n", WIDTH, 1e-5), "table", 50304, 0.02);
        let rows = |budget, tokens| head.chunk_rows(&Budget(budget), tokens, DType::Bf16);
        assert_eq!(rows(u64::MAX, 16384), 16384);
        assert_eq!(rows(1 << 29, 16384), 16384_usize.div_ceil(4).next_multiple_of(64));
        assert_eq!(rows(64 << 20, 16384), 16384_usize.div_ceil(25).next_multiple_of(64));
        assert_eq!(rows(1, 16384), 64, "never less than a tile of the matrix product");
        assert_eq!(rows(1, 10), 10);
        for budget in [1 << 26, 1 << 28, 1 << 30] {
            for tokens in [100, 1000, 4096, 16384, 100_000] {
                let bytes = DType::Bf16.bytes(rows(budget, tokens) * 50304).0;
                assert!(bytes <= budget + 63 * 2 * 50304, "{tokens} tokens: {bytes} of {budget}");
            }
        }
    }
}
