//! Token and position tables.

use gpurun_types::{DType, View};

use super::element::{Float, by_float};
use super::{CpuBackend, Result, float, is, kernels, length, shape};
use crate::{DeviceError, Embedding};

impl CpuBackend {
    pub(super) fn embedding_forward_op(&self, args: &Embedding, y: View) -> Result {
        const OP: &str = "embedding_forward";
        let Embedding { width, seq, .. } = *args;
        float(OP, "table", args.table)?;
        self.check_embedding(OP, args, y)?;
        if let Some(positions) = args.positions {
            is(OP, "positions", positions, args.table.dtype, positions.len)?;
        }
        is(OP, "y", y, args.table.dtype, args.tokens.len * width)?;
        let (tokens, starts) = (self.read::<i32>(args.tokens), self.read::<i32>(args.starts));
        by_float!(y, T => {
            let table = self.read::<T>(args.table);
            let positions = args.positions.map(|p| self.read::<T>(p));
            let out = self.shared::<T>(y);
            self.rows(tokens.len(), width, |rows| {
                let (mut sum, mut row) = (vec![0.0; width], vec![0.0; width]);
                for i in rows {
                    let token = tokens[i] as usize;
                    let from = &table[token * width..(token + 1) * width];
                    let to = out.part(i * width..(i + 1) * width);
                    let Some(positions) = positions else {
                        to.copy_from_slice(from);
                        continue;
                    };
                    let position = position(i, seq, starts);
                    T::load(from, &mut sum);
                    T::load(&positions[position * width..(position + 1) * width], &mut row);
                    kernels::add(&row, &mut sum);
                    T::store(&sum, to);
                }
            });
        });
        Ok(())
    }

    pub(super) fn embedding_backward_op(&self, args: &Embedding, dy: View) -> Result {
        const OP: &str = "embedding_backward";
        let Embedding { width, seq, .. } = *args;
        float(OP, "dy", dy)?;
        is(OP, "table", args.table, DType::F32, args.table.len)?;
        self.check_embedding(OP, args, dy)?;
        if let Some(positions) = args.positions {
            is(OP, "positions", positions, DType::F32, positions.len)?;
        }
        let (tokens, starts) = (self.read::<i32>(args.tokens), self.read::<i32>(args.starts));
        let rows = tokens.len();
        let table = self.shared::<f32>(args.table);
        let positions = args.positions.map(|p| self.shared::<f32>(p));
        by_float!(dy, T => {
            let dy = self.read::<T>(dy);
            // Each piece owns a stretch of columns and adds all rows in order: no two pieces share an element.
            let columns = if rows * width < 1 << 16 { width.max(1) } else { width.div_ceil(8).next_multiple_of(16) };
            self.pieces(width, columns, |c| {
                let mut wide = vec![0.0; c.len()];
                for i in 0..rows {
                    T::load(&dy[i * width + c.start..i * width + c.end], &mut wide);
                    let token = tokens[i] as usize;
                    kernels::add(&wide, table.part(token * width + c.start..token * width + c.end));
                    if let Some(positions) = &positions {
                        let at = position(i, seq, starts) * width;
                        kernels::add(&wide, positions.part(at + c.start..at + c.end));
                    }
                }
            });
        });
        Ok(())
    }

    fn check_embedding(&self, op: &'static str, args: &Embedding, rows: View) -> Result {
        let Embedding { tokens, width, seq, .. } = *args;
        is(op, "starts", args.starts, DType::I32, tokens.len)?;
        is(op, "tokens", tokens, DType::I32, tokens.len)?;
        length(op, "y", rows, tokens.len * width)?;
        if width == 0 || seq == 0 || !tokens.len.is_multiple_of(seq) || !args.table.len.is_multiple_of(width) {
            return Err(shape(op, format!("{} tokens, sequences of {seq}, width {width}", tokens.len)));
        }
        if let Some(p) = args.positions.filter(|p| p.len < seq * width || !p.len.is_multiple_of(width)) {
            let wanted = format!("at least {seq} rows of {width}");
            return Err(shape(op, format!("positions has {} elements, {wanted} are needed", p.len)));
        }
        let vocabulary = args.table.len / width;
        match self.read::<i32>(tokens).iter().position(|t| *t < 0 || *t as usize >= vocabulary) {
            None => Ok(()),
            Some(at) => Err(DeviceError::Failed {
                operation: op.to_owned(),
                reason: format!("token {} at {at} is not below {vocabulary}", self.read::<i32>(tokens)[at]),
            }),
        }
    }
}

/// Position of row `i` in its document.
fn position(i: usize, seq: usize, starts: &[i32]) -> usize {
    (i % seq).saturating_sub(starts[i].max(0) as usize)
}
