//! Embedding, cross-entropy, column sums.

use gpurun_types::{DType, Lane, View};

use super::check::{float, is, length, shape};
use super::driver::{Launch, arguments};
use super::{CudaBackend, KernelSource, Result};
use crate::{CrossEntropy, Embedding};

const SOURCE: KernelSource = KernelSource::Rows;

fn check_embedding(op: &'static str, args: &Embedding, rows: View) -> Result {
    let Embedding { tokens, width, seq, .. } = *args;
    is(op, "starts", args.starts, DType::I32, tokens.len)?;
    is(op, "tokens", tokens, DType::I32, tokens.len)?;
    length(op, "y", rows, tokens.len * width)?;
    if width == 0 || seq == 0 || !tokens.len.is_multiple_of(seq) || !args.table.len.is_multiple_of(width) {
        return Err(shape(op, format!("{} tokens, sequences of {seq}, width {width}", tokens.len)));
    }
    match args.positions.filter(|p| p.len < seq * width || !p.len.is_multiple_of(width)) {
        Some(p) => {
            let wanted = format!("at least {seq} rows of {width}");
            Err(shape(op, format!("positions has {} elements, {wanted} are needed", p.len)))
        }
        None => Ok(()),
    }
}

impl CudaBackend {
    pub(super) fn embedding_forward_op(&self, lane: Lane, args: &Embedding, y: View) -> Result {
        const OP: &str = "embedding_forward";
        let Embedding { tokens, table, width, seq, .. } = *args;
        float(OP, "table", table)?;
        check_embedding(OP, args, y)?;
        if let Some(positions) = args.positions {
            is(OP, "positions", positions, table.dtype, positions.len)?;
        }
        is(OP, "y", y, table.dtype, tokens.len * width)?;
        let (starts, positions) = (self.address(args.starts), self.optional(args.positions));
        let (tokens_at, table_at, y_at) = (self.address(tokens), self.address(table), self.address(y));
        let fault = self.faults.address;
        let list = arguments![tokens_at, starts, table_at, positions, y_at, seq, width, table.len / width, fault];
        let block = width.div_ceil(8).next_multiple_of(32).clamp(32, 256);
        // SAFETY: the kernel takes these; rows and widths fit the views, and tokens are checked where they are read.
        unsafe { self.launch(lane, (SOURCE, y.dtype, OP), Launch::new(tokens.len, block), list) }
    }

    pub(super) fn embedding_backward_op(&self, lane: Lane, args: &Embedding, dy: View) -> Result {
        const OP: &str = "embedding_backward";
        let Embedding { tokens, table, width, seq, .. } = *args;
        float(OP, "dy", dy)?;
        is(OP, "table", table, DType::F32, table.len)?;
        check_embedding(OP, args, dy)?;
        if let Some(positions) = args.positions {
            is(OP, "positions", positions, DType::F32, positions.len)?;
        }
        let (rows, dy_at, fault) = (tokens.len, self.address(dy), self.faults.address);
        let (tokens_at, table_at) = (self.address(tokens), self.address(table));
        let list = arguments![tokens_at, dy_at, table_at, rows, width, table.len / width, fault];
        // SAFETY: as in the forward.
        unsafe { self.launch(lane, (SOURCE, dy.dtype, OP), Launch::new(rows, 256), list)? };
        let Some(positions) = args.positions else { return Ok(()) };
        let list = arguments![self.address(args.starts), dy_at, self.address(positions), rows, seq, width];
        // SAFETY: as above; positions are below `seq`, and the table has at least as many rows.
        unsafe { self.launch(lane, (SOURCE, dy.dtype, "positions_backward"), Launch::new(seq, 256), list) }
    }

    pub(super) fn cross_entropy_op(&self, lane: Lane, args: &CrossEntropy) -> Result {
        const OP: &str = "cross_entropy";
        let CrossEntropy { logits, rows, vocabulary, .. } = *args;
        float(OP, "logits", logits)?;
        length(OP, "logits", logits, rows * vocabulary)?;
        is(OP, "targets", args.targets, DType::I32, rows)?;
        is(OP, "loss", args.loss, DType::F64, 1)?;
        is(OP, "row_losses", args.row_losses, DType::F32, rows)?;
        is(OP, "scale", args.scale, DType::F32, 1)?;
        let [logits_at, targets, losses, scale] =
            [logits, args.targets, args.row_losses, args.scale].map(|view| self.address(view));
        let fault = self.faults.address;
        let list = arguments![logits_at, targets, losses, scale, args.factor, vocabulary, args.backward, fault];
        let block = vocabulary.div_ceil(16).next_multiple_of(32).clamp(32, 1024);
        // SAFETY: the kernel takes these; lengths were checked, and targets are checked where they are read.
        unsafe { self.launch(lane, (SOURCE, logits.dtype, OP), Launch::new(rows, block), list)? };
        let list = arguments![losses, rows, self.address(args.loss)];
        // SAFETY: as above.
        unsafe { self.launch(lane, (SOURCE, logits.dtype, "add_losses"), Launch::new(rows.min(1), 1024), list) }
    }

    pub(super) fn bias_grad_op(&self, lane: Lane, dy: View, grad: View, rows: usize, columns: usize) -> Result {
        const OP: &str = "bias_grad";
        float(OP, "dy", dy)?;
        length(OP, "dy", dy, rows * columns)?;
        is(OP, "grad", grad, DType::F32, columns)?;
        if rows * columns == 0 {
            return Ok(());
        }
        let each = 16 / dy.dtype.size();
        let wide = columns.is_multiple_of(each) && self.address(dy).is_multiple_of(16);
        let (name, each) = if wide { ("column_sums_wide", each) } else { ("column_sums_single", 1) };
        // Parts depend on sizes only, and so do the bits of the sums.
        let per_part = rows.div_ceil(128).max(32);
        let parts = rows.div_ceil(per_part);
        let partials = self.workspace(lane, DType::F32.bytes(parts * columns).0)?;
        let list = arguments![self.address(dy), partials, rows, columns, per_part];
        let launch = Launch { grid: [columns.div_ceil(32 * each), parts, 1], block: [32, 8], shared: 0 };
        // SAFETY: the kernel takes these; the workspace has room for all parts.
        unsafe { self.launch(lane, (SOURCE, dy.dtype, name), launch, list)? };
        self.add_parts(lane, partials, grad, parts, columns)
    }

    /// `total[j] += sum over parts, in order, of partials[part * stride + j]`, of memory that the caller has checked.
    pub(super) fn add_parts(&self, lane: Lane, partials: u64, total: View, parts: usize, stride: usize) -> Result {
        let list = arguments![partials, self.address(total), parts, stride, total.len];
        let launch = Launch { grid: [total.len.div_ceil(32), 1, 1], block: [32, 8], shared: 0 };
        // SAFETY: the kernel takes these; the callers sized `partials`.
        unsafe { self.launch(lane, (SOURCE, DType::F32, "add_parts"), launch, list) }
    }
}
