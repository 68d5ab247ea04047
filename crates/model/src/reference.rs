//! A whole model, forward and backward, with every tensor in memory of its own and no plan: what faster ways of running it are
//! compared with.

use std::collections::HashMap;

use gpurun_device::{Backend, DeviceError};
use gpurun_types::{DType, Lane, Place, View};

use crate::{BatchShape, Cx, JOIN_ALIGN, Mode, Model, Param, Tensor, Unit, init};

/// Tokens of one micro-batch, `[batch, seq]` each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids.
    pub tokens: Vec<i32>,
    /// The token that follows each, or negative for none.
    pub targets: Vec<i32>,
    /// Index in its sequence of the first token of each token's document.
    pub starts: Vec<i32>,
}

impl Batch {
    /// Tokens that bear a loss.
    #[must_use]
    pub fn loss_tokens(&self) -> usize {
        self.targets.iter().filter(|t| **t >= 0).count()
    }
}

/// A model with its weights, gradients and activations on a backend.
pub struct Reference<'a> {
    backend: &'a dyn Backend,
    model: &'a Model,
    shape: BatchShape,
    dtype: DType,
    units: Vec<UnitMemory>,
    /// Edge `i` runs from unit `i` to unit `i + 1`.
    edges: Vec<View>,
    edge_grads: Vec<View>,
    inputs: Inputs,
    /// Unit and position of each parameter.
    owners: HashMap<String, (usize, usize)>,
    selective: bool,
    in_parts: bool,
}

impl<'a> Reference<'a> {
    /// Allocates everything for micro-batches of `shape`; weights and activations are of `dtype`. Weights are zero.
    ///
    /// # Errors
    /// When the backend cannot allocate.
    pub fn new(
        backend: &'a dyn Backend,
        model: &'a Model,
        shape: BatchShape,
        dtype: DType,
    ) -> Result<Self, DeviceError> {
        let mut units = Vec::new();
        let mut owners = HashMap::new();
        for (i, unit) in model.units.iter().enumerate() {
            units.push(UnitMemory::new(backend, unit.as_ref(), shape, dtype)?);
            owners.extend(unit.params().into_iter().enumerate().map(|(k, p)| (p.name, (i, k))));
        }
        for (i, unit) in model.units.iter().enumerate() {
            for name in unit.borrows() {
                let &(owner, k) = owners
                    .get(&name)
                    .ok_or_else(|| DeviceError::Missing(format!("no unit owns the borrowed parameter {name}")))?;
                let (weight, grad) = (units[owner].weights[k], units[owner].grads[k]);
                units[i].weights.push(weight);
                units[i].grads.push(grad);
            }
        }
        let widths: Vec<usize> = model.units[..model.units.len() - 1].iter().map(|u| u.output_width()).collect();
        let edges =
            || widths.iter().map(|w| allocate(backend, shape.tokens() * w, dtype)).collect::<Result<Vec<View>, _>>();
        Ok(Self {
            backend,
            model,
            shape,
            dtype,
            units,
            edges: edges()?,
            edge_grads: edges()?,
            inputs: Inputs::new(backend, shape)?,
            owners,
            selective: false,
            in_parts: false,
        })
    }

    /// With gradients of weights computed apart: the first parts of all units' backwards, then the second ones.
    #[must_use]
    pub fn in_parts(self) -> Self {
        Self { in_parts: true, ..self }
    }

    /// With selective recompute: restorable tensors are lost after the forward and restored before the backward.
    #[must_use]
    pub fn selective(self) -> Self {
        Self { selective: true, ..self }
    }

    /// Gives every parameter its starting values.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn initialise(&mut self, seed: u64) -> Result<(), DeviceError> {
        for param in self.model.params() {
            let mut values = vec![0.0; param.elements()];
            init::fill(seed, &param.name, param.init, 0, &mut values);
            self.set(&param.name, &values)?;
        }
        Ok(())
    }

    /// Sets a parameter, rounding to the model's type.
    ///
    /// # Errors
    /// When there is no such parameter, its size is another, or the backend fails.
    pub fn set(&mut self, name: &str, values: &[f32]) -> Result<(), DeviceError> {
        let (unit, k) = self.find(name)?;
        write(self.backend, values, self.units[unit].weights[k])
    }

    /// A parameter's values.
    ///
    /// # Errors
    /// When there is no such parameter, or the backend fails.
    pub fn parameter(&self, name: &str) -> Result<Vec<f32>, DeviceError> {
        let (unit, k) = self.find(name)?;
        read(self.backend, self.units[unit].weights[k])
    }

    /// A parameter's gradient, loss scale included.
    ///
    /// # Errors
    /// When there is no such parameter, or the backend fails.
    pub fn gradient(&self, name: &str) -> Result<Vec<f32>, DeviceError> {
        let (unit, k) = self.find(name)?;
        read(self.backend, self.units[unit].grads[k])
    }

    fn find(&self, name: &str) -> Result<(usize, usize), DeviceError> {
        let found = self.owners.get(name).copied();
        found.ok_or_else(|| DeviceError::Missing(format!("the model has no parameter {name}")))
    }

    /// Sets all gradients to zero.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn zero_gradients(&mut self) -> Result<(), DeviceError> {
        self.units.iter().try_for_each(|unit| self.backend.fill(Lane::Compute, unit.flat_grad, 0.0))
    }

    /// Forward and backward of one micro-batch: adds to the gradients those of `factor * scale * loss`, and answers the
    /// summed loss.
    ///
    /// # Errors
    /// When the batch's sizes differ from the shape, or the backend fails.
    pub fn train(&mut self, batch: &Batch, factor: f32, scale: f32) -> Result<f64, DeviceError> {
        self.inputs.load(self.backend, batch, scale)?;
        let last = self.model.units.len() - 1;
        for i in 0..last {
            self.forward(i, Mode::Train, factor)?;
        }
        if self.selective {
            (0..last).try_for_each(|i| self.lose(i))?;
        }
        for i in (0..=last).rev() {
            let unit = &self.units[i];
            if self.selective {
                let x = i.checked_sub(1).map(|before| self.edges[before]);
                let cx = self.cx(i, Mode::Train, factor);
                self.model.units[i].restore(&cx, &unit.weights, x, &unit.saved)?;
            }
            self.backward(i, factor)?;
        }
        if self.in_parts {
            (0..=last).rev().try_for_each(|i| self.backward_weights(i, factor))?;
        }
        self.inputs.loss(self.backend)
    }

    /// The backward of unit `i`, or its first part.
    fn backward(&self, i: usize, factor: f32) -> Result<(), DeviceError> {
        let (unit, cx) = (&self.units[i], self.cx(i, Mode::Train, factor));
        let edge = |edges: &[View]| i.checked_sub(1).map(|before| edges[before]);
        let (x, dy, dx) = (edge(&self.edges), self.edge_grads.get(i).copied(), edge(&self.edge_grads));
        let this = &self.model.units[i];
        match unit.deferred.as_deref().filter(|_| self.in_parts) {
            None => this.backward(&cx, &unit.weights, &unit.grads, x, dy, dx, &unit.saved),
            Some(left) => this.backward_input(&cx, &unit.weights, &unit.grads, x, dy, dx, &unit.saved, left),
        }
    }

    /// The second part of the backward of unit `i`, which finds nothing in its scratch.
    fn backward_weights(&self, i: usize, factor: f32) -> Result<(), DeviceError> {
        let (unit, cx) = (&self.units[i], self.cx(i, Mode::Train, factor));
        let Some(left) = &unit.deferred else { return Ok(()) };
        unit.scratch.iter().try_for_each(|view| self.backend.fill(Lane::Compute, *view, f32::NAN))?;
        let (x, dy) = (i.checked_sub(1).map(|before| self.edges[before]), self.edge_grads.get(i).copied());
        self.model.units[i].backward_weights(&cx, &unit.weights, &unit.grads, x, dy, &unit.saved, left)
    }

    /// Overwrites what unit `i` can restore.
    fn lose(&self, i: usize) -> Result<(), DeviceError> {
        let restorable = self.model.units[i].restorable();
        restorable.iter().try_for_each(|at| self.backend.fill(Lane::Compute, self.units[i].saved[*at], f32::NAN))
    }

    /// The summed loss of one micro-batch.
    ///
    /// # Errors
    /// As [`Reference::train`].
    pub fn evaluate(&mut self, batch: &Batch) -> Result<f64, DeviceError> {
        self.inputs.load(self.backend, batch, 1.0)?;
        (0..self.model.units.len()).try_for_each(|i| self.forward(i, Mode::Evaluate, 1.0))?;
        self.inputs.loss(self.backend)
    }

    /// The logits of each of `rows` (`batch * seq + position`), `[vocabulary]` each.
    ///
    /// # Errors
    /// As [`Reference::train`].
    pub fn logits(&mut self, batch: &Batch, rows: &[usize]) -> Result<Vec<Vec<f32>>, DeviceError> {
        self.inputs.load(self.backend, batch, 1.0)?;
        let last = self.model.units.len() - 1;
        (0..last).try_for_each(|i| self.forward(i, Mode::Evaluate, 1.0))?;
        let out = allocate(self.backend, self.model.vocabulary, self.dtype)?;
        let (unit, cx, x) = (&self.units[last], self.cx(last, Mode::Evaluate, 1.0), self.edges[last - 1]);
        rows.iter()
            .map(|&row| {
                self.model.units[last].logits(&cx, &unit.weights, x, row, out, &unit.saved)?;
                read(self.backend, out)
            })
            .collect()
    }

    /// Output of unit `i` in the last pass.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn output(&self, i: usize) -> Result<Vec<f32>, DeviceError> {
        read(self.backend, self.edges[i])
    }

    fn forward(&self, i: usize, mode: Mode, factor: f32) -> Result<(), DeviceError> {
        let x = i.checked_sub(1).map(|before| self.edges[before]);
        let (unit, y) = (&self.units[i], self.edges.get(i).copied());
        self.model.units[i].forward(&self.cx(i, mode, factor), &unit.weights, x, y, &unit.saved)
    }

    fn cx(&self, unit: usize, mode: Mode, factor: f32) -> Cx<'_> {
        self.inputs.cx(self.backend, self.shape, self.dtype, mode, factor, &self.units[unit].scratch)
    }
}

/// Memory of one unit.
pub(crate) struct UnitMemory {
    /// Own parameters, then borrowed ones.
    pub weights: Vec<View>,
    /// fp32, likewise.
    pub grads: Vec<View>,
    /// Own gradients as one run.
    pub flat_grad: View,
    pub saved: Vec<View>,
    pub scratch: Vec<View>,
    /// Of a unit that has a backward in two parts.
    pub deferred: Option<Vec<View>>,
}

impl UnitMemory {
    pub(crate) fn new(
        backend: &dyn Backend,
        unit: &dyn Unit,
        shape: BatchShape,
        dtype: DType,
    ) -> Result<Self, DeviceError> {
        let params = unit.params();
        let total = params.iter().map(|p| p.elements().next_multiple_of(JOIN_ALIGN)).sum::<usize>().max(1);
        let flat_grad = allocate(backend, total, DType::F32)?;
        let tensors = |list: Vec<Tensor>| {
            list.iter().map(|t| allocate(backend, t.elements, t.dtype)).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            weights: cut(allocate(backend, total, dtype)?, &params),
            grads: cut(flat_grad, &params),
            flat_grad,
            saved: tensors(unit.saved(shape, dtype))?,
            scratch: tensors(unit.scratch(backend, shape, dtype))?,
            deferred: unit.deferred(shape, dtype).map(tensors).transpose()?,
        })
    }
}

/// The parameters' views of a unit's flat buffer.
fn cut(flat: View, params: &[Param]) -> Vec<View> {
    let mut start = 0;
    params
        .iter()
        .map(|param| {
            let view = flat.slice(start, param.elements());
            start += param.elements().next_multiple_of(JOIN_ALIGN);
            view
        })
        .collect()
}

/// What every unit of a pass reads, and the loss.
pub(crate) struct Inputs {
    tokens: View,
    targets: View,
    starts: View,
    loss: View,
    loss_scale: View,
}

impl Inputs {
    pub(crate) fn new(backend: &dyn Backend, shape: BatchShape) -> Result<Self, DeviceError> {
        let ids = || allocate(backend, shape.tokens(), DType::I32);
        Ok(Self {
            tokens: ids()?,
            targets: ids()?,
            starts: ids()?,
            loss: allocate(backend, 1, DType::F64)?,
            loss_scale: allocate(backend, 1, DType::F32)?,
        })
    }

    /// Loads a batch and sets the loss to zero.
    pub(crate) fn load(&self, backend: &dyn Backend, batch: &Batch, scale: f32) -> Result<(), DeviceError> {
        for (ids, view) in [(&batch.tokens, self.tokens), (&batch.targets, self.targets), (&batch.starts, self.starts)]
        {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
            backend.upload(&bytes, view)?;
        }
        backend.upload(&0f64.to_ne_bytes(), self.loss)?;
        backend.upload(&scale.to_ne_bytes(), self.loss_scale)
    }

    pub(crate) fn loss(&self, backend: &dyn Backend) -> Result<f64, DeviceError> {
        backend.synchronize(Lane::Compute)?;
        let mut bytes = [0; 8];
        backend.download(self.loss, &mut bytes)?;
        Ok(f64::from_ne_bytes(bytes))
    }

    pub(crate) fn cx<'c>(
        &self,
        backend: &'c dyn Backend,
        shape: BatchShape,
        dtype: DType,
        mode: Mode,
        loss_factor: f32,
        scratch: &'c [View],
    ) -> Cx<'c> {
        Cx {
            backend,
            lane: Lane::Compute,
            shape,
            dtype,
            mode,
            tokens: self.tokens,
            targets: self.targets,
            starts: self.starts,
            scratch,
            loss: self.loss,
            loss_scale: self.loss_scale,
            loss_factor,
        }
    }
}

/// Memory of its own for a tensor.
pub(crate) fn allocate(backend: &dyn Backend, len: usize, dtype: DType) -> Result<View, DeviceError> {
    Ok(View { arena: backend.allocate(Place::Device, dtype.bytes(len))?, offset: 0, len, dtype })
}

/// Writes fp32 values into a view of any floating type.
pub(crate) fn write(backend: &dyn Backend, values: &[f32], view: View) -> Result<(), DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    if view.dtype == DType::F32 {
        return backend.upload(&bytes, view);
    }
    let staging = allocate(backend, values.len(), DType::F32)?;
    backend.upload(&bytes, staging)?;
    backend.cast(Lane::Compute, staging, view)?;
    backend.synchronize(Lane::Compute)
}

/// Reads a view of any floating type as fp32.
pub(crate) fn read(backend: &dyn Backend, view: View) -> Result<Vec<f32>, DeviceError> {
    let source = match view.dtype {
        DType::F32 => view,
        _ => {
            let staging = allocate(backend, view.len, DType::F32)?;
            backend.cast(Lane::Compute, view, staging)?;
            staging
        }
    };
    backend.synchronize(Lane::Compute)?;
    let mut bytes = vec![0; view.len * DType::F32.size()];
    backend.download(source, &mut bytes)?;
    let word = |b: &[u8]| f32::from_ne_bytes(b.try_into().expect("chunks are of four bytes"));
    Ok(bytes.chunks_exact(4).map(word).collect())
}
