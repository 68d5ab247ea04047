//! Forward passes of one device without a plan: weights, two edges, scratch, and nothing else. For sampling.

use std::sync::Arc;

use gpurun_device::{Backend, DeviceError};
use gpurun_model::{BatchShape, Cx, Mode, Model, Tensor};
use gpurun_plan::param_starts;
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

use crate::describe::Owners;
use crate::error::EngineError;

const ALIGN: u64 = 256;

/// A model in memory, for forward passes over one sequence.
pub struct Inference {
    backend: Arc<dyn Backend>,
    model: Arc<Model>,
    dtype: DType,
    seq: usize,
    layout: Layout,
}

struct Layout {
    /// Own parameters of each unit, then borrowed ones.
    weights: Vec<Vec<View>>,
    edges: [View; 2],
    saved: Vec<Vec<View>>,
    scratch: Vec<Vec<View>>,
    batch: [View; 3],
    loss: View,
    scale: View,
}

/// Hands out aligned runs of an arena; first counts, then places.
struct Cursor {
    arena: ArenaId,
    at: u64,
}

impl Cursor {
    fn take(&mut self, elements: usize, dtype: DType) -> View {
        let view = View { arena: self.arena, offset: self.at, len: elements, dtype };
        self.at = Bytes(self.at + view.bytes()).align_up(ALIGN).0;
        view
    }

    fn tensors(&mut self, tensors: &[Tensor]) -> Vec<View> {
        tensors.iter().map(|t| self.take(t.elements, t.dtype)).collect()
    }
}

impl Inference {
    /// Allocates for sequences of up to `seq` tokens. Weights are zero until `load`.
    pub fn new(backend: Arc<dyn Backend>, model: Arc<Model>, dtype: DType, seq: usize) -> Result<Self, EngineError> {
        let mut count = Cursor { arena: ArenaId(0), at: 0 };
        place(&mut count, &model, dtype, seq, backend.as_ref())?;
        let arena = backend.allocate(Place::Device, Bytes(count.at)).map_err(EngineError::DoesNotFit)?;
        let layout = place(&mut Cursor { arena, at: 0 }, &model, dtype, seq, backend.as_ref())?;
        backend.upload(&1.0f32.to_le_bytes(), layout.scale).map_err(failed)?;
        Ok(Self { backend, model, dtype, seq, layout })
    }

    /// Fills the weights by `read(name, start, out)`.
    pub fn load(
        &self,
        mut read: impl FnMut(&str, usize, &mut [f32]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for (unit, views) in self.model.units.iter().zip(&self.layout.weights) {
            for (param, view) in unit.params().iter().zip(views) {
                let mut start = 0;
                while start < view.len {
                    let len = (view.len - start).min(1 << 20);
                    let mut values = vec![0.0; len];
                    read(&param.name, start, &mut values)?;
                    let bytes = crate::session::encode(&values, self.dtype);
                    self.backend.upload(&bytes, view.slice(start, len)).map_err(failed)?;
                    start += len;
                }
            }
        }
        Ok(())
    }

    /// Logits of the token after `tokens` (one document, at most `seq` tokens, at least one).
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        assert!(!tokens.is_empty() && tokens.len() <= self.seq, "between 1 and {} tokens", self.seq);
        let mut padded: Vec<u8> = tokens.iter().flat_map(|t| (*t as i32).to_le_bytes()).collect();
        padded.resize(self.seq * 4, 0);
        self.backend.upload(&padded, self.layout.batch[0]).map_err(failed)?;
        let logits = self.forward(tokens.len() - 1).map_err(failed)?;
        self.backend.synchronize(Lane::Compute).map_err(failed)?;
        let mut bytes = vec![0; logits.bytes() as usize];
        self.backend.download(logits, &mut bytes).map_err(failed)?;
        let mut out = vec![0.0; logits.len];
        crate::session::decode(&bytes, logits.dtype, &mut out);
        Ok(out)
    }

    fn forward(&self, row: usize) -> Result<View, DeviceError> {
        let shape = BatchShape { batch: 1, seq: self.seq };
        let layout = &self.layout;
        let mut input: Option<View> = None;
        for (index, unit) in self.model.units.iter().enumerate() {
            let cx = Cx {
                backend: self.backend.as_ref(),
                lane: Lane::Compute,
                shape,
                dtype: self.dtype,
                mode: Mode::Evaluate,
                tokens: layout.batch[0],
                targets: layout.batch[1],
                starts: layout.batch[2],
                scratch: &layout.scratch[index],
                loss: layout.loss,
                loss_scale: layout.scale,
                loss_factor: 1.0,
            };
            let (weights, saved) = (&layout.weights[index], &layout.saved[index]);
            if unit.output_width() == 0 {
                let logits = self.logits_view(index)?;
                let x = input.ok_or_else(|| DeviceError::Missing("a model of one unit has no logits".into()))?;
                unit.logits(&cx, weights, x, row, logits, saved)?;
                return Ok(logits);
            }
            let y = layout.edges[index % 2].slice(0, unit.output_width() * self.seq);
            unit.forward(&cx, weights, input, Some(y), saved)?;
            input = Some(y);
        }
        Err(DeviceError::Missing("the model has no loss unit".into()))
    }

    fn logits_view(&self, index: usize) -> Result<View, DeviceError> {
        let scratch =
            self.model.units[index].scratch(self.backend.as_ref(), BatchShape { batch: 1, seq: self.seq }, self.dtype);
        let at = scratch.iter().position(|t| t.name == "logits");
        let at = at.ok_or_else(|| DeviceError::Missing("the loss unit has no scratch tensor named logits".into()))?;
        Ok(self.layout.scratch[index][at].slice(0, self.model.vocabulary))
    }
}

fn place(
    cursor: &mut Cursor,
    model: &Model,
    dtype: DType,
    seq: usize,
    backend: &dyn Backend,
) -> Result<Layout, EngineError> {
    let shape = BatchShape { batch: 1, seq };
    let owners = Owners::of(model);
    let mut weights: Vec<Vec<View>> = Vec::new();
    for unit in &model.units {
        let (starts, end) = param_starts(unit.params().iter().map(gpurun_model::Param::elements));
        let flat = cursor.take(end, dtype);
        let own = unit.params().iter().zip(starts).map(|(p, s)| flat.slice(s, p.elements())).collect();
        weights.push(own);
    }
    for index in 0..model.units.len() {
        for name in model.units[index].borrows() {
            let (owner, position) =
                owners.find(&name).ok_or_else(|| EngineError::Config(format!("no unit owns parameter {name}")))?;
            let view = weights[owner.0 as usize][position];
            weights[index].push(view);
        }
    }
    let widest = model.units.iter().map(|u| u.output_width()).max().unwrap_or(0) * seq;
    let edges = [cursor.take(widest, dtype), cursor.take(widest, dtype)];
    // Units run one after the other and nothing is kept, so all share one stretch for saved and scratch tensors.
    let shared = cursor.at;
    let (mut saved, mut scratch, mut end) = (Vec::new(), Vec::new(), shared);
    for unit in &model.units {
        cursor.at = shared;
        saved.push(cursor.tensors(&unit.saved(shape, dtype)));
        scratch.push(cursor.tensors(&unit.scratch(backend, shape, dtype)));
        end = end.max(cursor.at);
    }
    cursor.at = end;
    let batch = [(); 3].map(|()| cursor.take(seq, DType::I32));
    Ok(Layout {
        weights,
        edges,
        saved,
        scratch,
        batch,
        loss: cursor.take(1, DType::F64),
        scale: cursor.take(1, DType::F32),
    })
}

fn failed(source: DeviceError) -> EngineError {
    EngineError::SetUp { what: "a forward pass", source }
}
