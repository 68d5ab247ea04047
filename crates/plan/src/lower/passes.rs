//! Forwards and backwards over edges, saved tensors and scratch. Every buffer is fresh; the memory pass lets those of
//! disjoint lifetimes share bytes.

use std::collections::BTreeMap;

use gpurun_types::{DType, Lane, Place};

use super::gradients::Gradients;
use super::weights::Gathers;
use crate::build::Builder;
use crate::ir::{Kind, Op, PassIo, Region};
use crate::spec::{Micro, NamedTensor, UnitId};
use crate::steps::Step;

/// What passes leave for each other.
pub(crate) struct Passes {
    batch: BTreeMap<Micro, [Region; 3]>,
    /// Outgoing edge of each unit.
    edges: BTreeMap<(Micro, UnitId), Region>,
    /// Gradient of each unit's outgoing edge.
    edge_grads: BTreeMap<(Micro, UnitId), Region>,
    saved: BTreeMap<(Micro, UnitId), Vec<Region>>,
    evaluate: bool,
}

impl Passes {
    pub(crate) fn new(evaluate: bool) -> Self {
        Self {
            batch: BTreeMap::new(),
            edges: BTreeMap::new(),
            edge_grads: BTreeMap::new(),
            saved: BTreeMap::new(),
            evaluate,
        }
    }

    pub(crate) fn lower(
        &mut self,
        b: &mut Builder<'_>,
        index: usize,
        step: Step,
        gathers: &Gathers,
        gradients: &Gradients,
    ) {
        match step {
            Step::Load(micro) => self.load(b, micro),
            Step::Receive { micro, gradient } => self.receive(b, micro, gradient),
            Step::Send { micro, gradient } => self.send(b, micro, gradient),
            Step::Forward { unit, micro, again, keep } => {
                let weights = gathers.weights(b, index, unit);
                self.forward(b, unit, micro, again, keep, weights);
            }
            Step::Restore { unit, micro } => {
                let weights = gathers.weights(b, index, unit);
                self.restore(b, unit, micro, weights);
            }
            Step::Backward { unit, micro } => {
                let weights = gathers.weights(b, index, unit);
                let grads = gradients.of(b, unit);
                self.backward(b, unit, micro, weights, grads);
            }
        }
    }

    fn load(&mut self, b: &mut Builder<'_>, micro: Micro) {
        let batch = ["tokens", "targets", "starts"]
            .map(|name| b.transient(name.to_owned(), Kind::Batch, Place::Device, b.spec.tokens, DType::I32));
        let first = micro == Micro(0) && !self.evaluate;
        let learning_rate = first.then_some(b.learning_rate);
        b.emit(Lane::CopyIn, Op::LoadBatch { micro, batch, learning_rate });
        self.batch.insert(micro, batch);
    }

    fn receive(&mut self, b: &mut Builder<'_>, micro: Micro, gradient: bool) {
        let units = b.stage.units.clone();
        let (unit, peer, what) = if gradient {
            (UnitId(units.end - 1), b.stage.index + 1, "output gradient, received")
        } else {
            (UnitId(units.start - 1), b.stage.index - 1, "output, received")
        };
        let spec = &b.spec.units[unit.0 as usize];
        let (name, elements) = (format!("{}/{what}", spec.name), spec.output);
        let dst = edge(b, &name, elements);
        let edges = if gradient { &mut self.edge_grads } else { &mut self.edges };
        edges.insert((micro, unit), dst);
        b.emit(Lane::Receive, Op::Recv { peer: b.peer(peer), micro, dst });
    }

    fn send(&mut self, b: &mut Builder<'_>, micro: Micro, gradient: bool) {
        let units = b.stage.units.clone();
        let (src, peer) = if gradient {
            let src = self.edge_grads.remove(&(micro, UnitId(units.start - 1)));
            (src.expect("the backward of the first unit came before"), b.stage.index - 1)
        } else {
            (self.edges[&(micro, UnitId(units.end - 1))], b.stage.index + 1)
        };
        b.emit(Lane::Send, Op::Send { peer: b.peer(peer), micro, src });
    }

    fn forward(
        &mut self,
        b: &mut Builder<'_>,
        unit: UnitId,
        micro: Micro,
        again: bool,
        keep: bool,
        weights: Vec<Region>,
    ) {
        let spec = &b.spec.units[unit.0 as usize];
        let (output, saved_tensors, scratch_tensors) = (spec.output, spec.saved.clone(), spec.scratch.clone());
        let name = spec.name.clone();
        let y = (output > 0).then(|| edge(b, &format!("{name}/output"), output));
        let saved = tensors(b, &name, &saved_tensors, Kind::Activations);
        let scratch = tensors(b, &name, &scratch_tensors, Kind::Workspace);
        if let (Some(y), false) = (y, again) {
            self.edges.insert((micro, unit), y);
        }
        if keep {
            self.saved.insert((micro, unit), saved.clone());
        }
        let loss_unit = output == 0;
        let io = PassIo {
            weights,
            grads: Vec::new(),
            x: self.input(micro, unit),
            y,
            dy: None,
            dx: None,
            saved,
            scratch,
            batch: self.batch[&micro],
            loss: loss_unit.then(|| self.loss(b, micro)),
            scalars: loss_unit.then_some(b.scalars),
        };
        b.emit(Lane::Compute, Op::Forward { unit, micro, again, io });
    }

    /// Fresh buffers for the tensors that were freed: the forward's own died with it.
    fn restore(&mut self, b: &mut Builder<'_>, unit: UnitId, micro: Micro, weights: Vec<Region>) {
        let spec = &b.spec.units[unit.0 as usize];
        let (name, filled) = (spec.name.clone(), spec.restorable.clone());
        let (saved_tensors, scratch_tensors) = (spec.saved.clone(), spec.scratch.clone());
        let mut saved = self.saved.remove(&(micro, unit)).expect("a forward came before");
        for &at in &filled {
            saved[at] = tensors(b, &name, &saved_tensors[at..=at], Kind::Activations)[0];
        }
        self.saved.insert((micro, unit), saved.clone());
        let io = PassIo {
            weights,
            grads: Vec::new(),
            x: self.input(micro, unit),
            y: None,
            dy: None,
            dx: None,
            saved,
            scratch: tensors(b, &name, &scratch_tensors, Kind::Workspace),
            batch: self.batch[&micro],
            loss: None,
            scalars: None,
        };
        b.emit(Lane::Compute, Op::Restore { unit, micro, filled, io });
    }

    fn backward(&mut self, b: &mut Builder<'_>, unit: UnitId, micro: Micro, weights: Vec<Region>, grads: Vec<Region>) {
        let spec = &b.spec.units[unit.0 as usize];
        let (input, scratch_tensors) = (spec.input, spec.scratch.clone());
        let (name, loss_unit) = (spec.name.clone(), spec.output == 0);
        let dx = (input > 0).then(|| edge(b, &format!("{name}/input gradient"), input));
        // The loss unit had no forward, and keeps nothing (see `build::check`).
        let saved = self.saved.remove(&(micro, unit)).unwrap_or_default();
        let scratch = tensors(b, &name, &scratch_tensors, Kind::Workspace);
        let io = PassIo {
            weights,
            grads,
            x: self.input(micro, unit),
            y: None,
            dy: self.edge_grads.remove(&(micro, unit)),
            dx,
            saved,
            scratch,
            batch: self.batch[&micro],
            loss: loss_unit.then(|| self.loss(b, micro)),
            scalars: loss_unit.then_some(b.scalars),
        };
        if let (Some(dx), Some(before)) = (dx, unit.0.checked_sub(1)) {
            self.edge_grads.insert((micro, UnitId(before)), dx);
        }
        b.emit(Lane::Compute, Op::Backward { unit, micro, io });
    }

    fn input(&self, micro: Micro, unit: UnitId) -> Option<Region> {
        unit.0.checked_sub(1).map(|before| self.edges[&(micro, UnitId(before))])
    }

    /// Where the loss unit adds the loss of a micro-batch.
    fn loss(&self, b: &Builder<'_>, micro: Micro) -> Region {
        if self.evaluate {
            Region { start: b.eval_losses.start + b.row_index(), len: 1, ..b.eval_losses }
        } else {
            let start = b.partials.start + b.row_index() * b.row() + b.spec.units.len() + micro.0 as usize;
            Region { start, len: 1, ..b.partials }
        }
    }
}

fn edge(b: &mut Builder<'_>, name: &str, elements: usize) -> Region {
    b.transient(name.to_owned(), Kind::Activations, Place::Device, elements, b.options.dtype)
}

fn tensors(b: &mut Builder<'_>, unit: &str, tensors: &[NamedTensor], kind: Kind) -> Vec<Region> {
    tensors
        .iter()
        .map(|t| {
            let kind = if t.name == "logits" { Kind::Logits } else { kind };
            b.transient(format!("{unit}/{}", t.name), kind, Place::Device, t.elements, t.dtype)
        })
        .collect()
}
