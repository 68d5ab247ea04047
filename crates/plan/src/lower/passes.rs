//! Forwards and backwards over edges, saved tensors and scratch. Every buffer is fresh; the memory pass lets those of
//! disjoint lifetimes share bytes.

use std::collections::BTreeMap;

use gpurun_types::{DType, Lane, Place};

use super::gradients::Gradients;
use super::weights::Gathers;
use crate::build::Builder;
use crate::ir::{Kind, Op, Parcel, Part, PassIo, Region};
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
    deferred: BTreeMap<(Micro, UnitId), Vec<Region>>,
    evaluate: bool,
}

impl Passes {
    pub(crate) fn new(evaluate: bool) -> Self {
        Self {
            batch: BTreeMap::new(),
            edges: BTreeMap::new(),
            edge_grads: BTreeMap::new(),
            saved: BTreeMap::new(),
            deferred: BTreeMap::new(),
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
            Step::Receive { unit, micro, gradient } => self.receive(b, unit, micro, gradient),
            Step::Send { unit, micro, gradient } => self.send(b, unit, micro, gradient),
            Step::Forward { unit, micro, again, keep } => {
                let weights = gathers.weights(b, index, unit);
                self.forward(b, unit, micro, again, keep, weights);
            }
            Step::Restore { unit, micro } => {
                let weights = gathers.weights(b, index, unit);
                self.restore(b, unit, micro, weights);
            }
            Step::Backward { unit, micro, part } => {
                let weights = gathers.weights(b, index, unit);
                let grads = gradients.of(b, unit, micro);
                self.backward(b, unit, micro, part, weights, grads);
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

    fn receive(&mut self, b: &mut Builder<'_>, unit: UnitId, micro: Micro, gradient: bool) {
        let spec = &b.spec.units[unit.0 as usize];
        let (from, parcel, what, edges) = match gradient {
            false => (unit, Parcel::Edge, "output, received", &mut self.edges),
            true => (UnitId(unit.0 + 1), Parcel::EdgeGradient, "output gradient, received", &mut self.edge_grads),
        };
        let (name, elements) = (format!("{}/{what}", spec.name), spec.output);
        let dst = edge(b, &name, elements);
        edges.insert((micro, unit), dst);
        let peer = b.peer(b.stage_of(from));
        b.emit(Lane::Receive, Op::Recv { peer, parcel, unit, micro, dst });
    }

    fn send(&mut self, b: &mut Builder<'_>, unit: UnitId, micro: Micro, gradient: bool) {
        let (src, to, parcel) = if gradient {
            let src = self.edge_grads.remove(&(micro, unit));
            (src.expect("the backward of the unit behind it came before"), unit, Parcel::EdgeGradient)
        } else {
            (self.edges[&(micro, unit)], UnitId(unit.0 + 1), Parcel::Edge)
        };
        let peer = b.peer(b.stage_of(to));
        b.emit(Lane::Send, Op::Send { peer, parcel, unit, micro, src });
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
            deferred: Vec::new(),
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
            deferred: Vec::new(),
            batch: self.batch[&micro],
            loss: None,
            scalars: None,
        };
        b.emit(Lane::Compute, Op::Restore { unit, micro, filled, io });
    }

    fn backward(
        &mut self,
        b: &mut Builder<'_>,
        unit: UnitId,
        micro: Micro,
        part: Part,
        weights: Vec<Region>,
        grads: Vec<Region>,
    ) {
        let (spec, key) = (&b.spec.units[unit.0 as usize], (micro, unit));
        let (input, scratch_tensors, deferred_tensors) = (spec.input, spec.scratch.clone(), spec.deferred.clone());
        let (name, loss_unit) = (spec.name.clone(), spec.output == 0);
        let dx = (input > 0 && part != Part::Weights).then(|| edge(b, &format!("{name}/input gradient"), input));
        // The loss unit had no forward, and keeps nothing (see `build::check`). The first part leaves all for the second.
        let (saved, dy) = match part {
            Part::Input => (self.saved.get(&key).cloned(), self.edge_grads.get(&key).copied()),
            Part::Whole | Part::Weights => (self.saved.remove(&key), self.edge_grads.remove(&key)),
        };
        let deferred = match part {
            Part::Whole => Vec::new(),
            Part::Input => {
                let left = tensors(b, &name, &deferred_tensors, Kind::Activations);
                self.deferred.insert(key, left.clone());
                left
            }
            Part::Weights => self.deferred.remove(&key).expect("the first part came before"),
        };
        let scratch = tensors(b, &name, &scratch_tensors, Kind::Workspace);
        let io = PassIo {
            weights,
            grads,
            x: self.input(micro, unit),
            y: None,
            dy,
            dx,
            saved: saved.unwrap_or_default(),
            scratch,
            deferred,
            batch: self.batch[&micro],
            loss: loss_unit.then(|| self.loss(b, micro)),
            scalars: loss_unit.then_some(b.scalars),
        };
        if let (Some(dx), Some(before)) = (dx, unit.0.checked_sub(1)) {
            self.edge_grads.insert((micro, UnitId(before)), dx);
        }
        b.emit(Lane::Compute, Op::Backward { unit, micro, part, io });
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
