use gpurun_device::{DeviceError, Embedding, ScratchSizes};
use gpurun_types::{DType, View};

use crate::{BatchShape, Cx, Init, Param, Tensor, Unit};

/// First unit of the chain: a row of a table for each token, plus a learned position where there is such a table.
///
/// Positions count from the start of the token's document.
pub struct EmbeddingUnit {
    name: String,
    table: Param,
    positions: Option<Param>,
    width: usize,
}

impl EmbeddingUnit {
    /// A table `{table}.weight` of `[vocabulary, width]`, normal with deviation `std`.
    #[must_use]
    pub fn new(name: &str, table: &str, vocabulary: usize, width: usize, std: f32) -> Self {
        Self { name: name.to_owned(), table: Self::param(table, vocabulary, width, std), positions: None, width }
    }

    /// With learned positions: a table `{positions}.weight` of `[longest, width]`, normal with deviation `std`.
    #[must_use]
    pub fn positions(self, positions: &str, longest: usize, std: f32) -> Self {
        Self { positions: Some(Self::param(positions, longest, self.width, std)), ..self }
    }

    fn param(name: &str, rows: usize, width: usize, std: f32) -> Param {
        Param { name: format!("{name}.weight"), shape: vec![rows, width], init: Init::Normal { std }, decay: true }
    }

    fn args(&self, cx: &Cx<'_>, tables: &[View]) -> Embedding {
        Embedding {
            tokens: cx.tokens,
            starts: cx.starts,
            table: tables[0],
            positions: tables.get(1).copied(),
            seq: cx.shape.seq,
            width: self.width,
        }
    }
}

impl Unit for EmbeddingUnit {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<Param> {
        std::iter::once(&self.table).chain(&self.positions).cloned().collect()
    }

    fn input_width(&self) -> usize {
        0
    }

    fn output_width(&self) -> usize {
        self.width
    }

    fn saved(&self, _shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        Vec::new()
    }

    fn scratch(&self, _sizes: &dyn ScratchSizes, _shape: BatchShape, _dtype: DType) -> Vec<Tensor> {
        Vec::new()
    }

    fn forward_flops_per_token(&self, _seq: usize) -> f64 {
        0.0
    }

    fn forward(
        &self,
        cx: &Cx<'_>,
        weights: &[View],
        _x: Option<View>,
        y: Option<View>,
        _saved: &[View],
    ) -> Result<(), DeviceError> {
        let y = y.expect("an embedding is not the last unit");
        cx.backend.embedding_forward(cx.lane, self.args(cx, weights), y)
    }

    fn backward(
        &self,
        cx: &Cx<'_>,
        _weights: &[View],
        grads: &[View],
        _x: Option<View>,
        dy: Option<View>,
        _dx: Option<View>,
        _saved: &[View],
    ) -> Result<(), DeviceError> {
        let dy = dy.expect("an embedding is not the last unit");
        cx.backend.embedding_backward(cx.lane, self.args(cx, grads), dy)
    }
}
