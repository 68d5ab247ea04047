//! Where a sequence keeps the tensors between its layers.

use crate::layers::{Activations, Layer};

/// Where a tensor between two layers lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the sequence's own saved tensors.
    Saved(usize),
    /// In the sequence's own scratch.
    Slot(usize),
    /// In the sequence's own deferred tensors.
    Deferred(usize),
}

/// Where the tensors of one way to run the backward live.
pub(super) struct Places {
    /// Output of each layer but the last.
    pub(super) between: Vec<Place>,
    /// Gradient of that output.
    pub(super) gradients: Vec<Place>,
}

/// Places tensors between layers, by walking the backward once.
pub(super) struct Assignment {
    pub(super) between: Vec<Place>,
    pub(super) gradients: Vec<Place>,
    pub(super) saved_widths: Vec<usize>,
    pub(super) slot_widths: Vec<usize>,
    pub(super) deferred_widths: Vec<usize>,
    busy: Vec<bool>,
}

impl Assignment {
    /// For a whole backward; or, given what layers defer, for one in two parts: then gradients of outputs of layers that have a
    /// second part are kept for it, and no gradient is written over a saved tensor.
    pub(super) fn of(layers: &[Box<dyn Layer>], activations: Activations, parts: Option<&[Option<usize>]>) -> Self {
        let gaps = layers.len() - 1;
        let mut this = Self {
            between: Vec::with_capacity(gaps),
            gradients: vec![Place::Slot(usize::MAX); gaps],
            saved_widths: Vec::new(),
            slot_widths: Vec::new(),
            deferred_widths: Vec::new(),
            busy: Vec::new(),
        };
        let mut kept_before = true;
        for layer in &layers[..gaps] {
            // Computing a tensor again needs the one before it, so of two cheap layers in a row the first keeps its output.
            let again = activations == Activations::Lean && layer.capabilities().cheap && kept_before;
            kept_before = !again;
            if again {
                this.between.push(Place::Slot(usize::MAX));
            } else {
                this.between.push(Place::Saved(this.saved_widths.len()));
                this.saved_widths.push(layer.output_width());
            }
        }
        this.walk_backward(layers, parts);
        this
    }

    fn walk_backward(&mut self, layers: &[Box<dyn Layer>], parts: Option<&[Option<usize>]>) {
        let mut dy: Option<Place> = None;
        for (i, layer) in layers.iter().enumerate().rev() {
            if i == 0 {
                break;
            }
            let (can, width) = (layer.capabilities(), layer.input_width());
            if matches!(self.between[i - 1], Place::Slot(_)) {
                self.between[i - 1] = self.slot(width);
            }
            let x = self.between[i - 1];
            let gone = parts.is_none() || matches!(x, Place::Slot(_));
            let over_dy =
                dy.filter(|d| can.dx_over_dy && layer.output_width() == width && !matches!(d, Place::Deferred(_)));
            let dx = match over_dy {
                _ if parts.is_some_and(|deferred| deferred[i - 1].is_some()) => self.deferred(width),
                _ if can.dx_over_x && gone => x,
                Some(place) => place,
                None => self.slot(width),
            };
            self.gradients[i - 1] = dx;
            for done in [Some(x), dy].into_iter().flatten().filter(|&place| place != dx) {
                if let Place::Slot(slot) = done {
                    self.busy[slot] = false;
                }
            }
            dy = Some(dx);
        }
    }

    /// A tensor for the second part of the backward.
    fn deferred(&mut self, width: usize) -> Place {
        self.deferred_widths.push(width);
        Place::Deferred(self.deferred_widths.len() - 1)
    }

    /// A free slot of at least `width` elements a token: the free one that needs the least growth, or a new one.
    fn slot(&mut self, width: usize) -> Place {
        let free = (0..self.busy.len()).filter(|&i| !self.busy[i]);
        let best = free.min_by_key(|&i| (width.saturating_sub(self.slot_widths[i]), self.slot_widths[i]));
        let slot = best.unwrap_or_else(|| {
            self.busy.push(false);
            self.slot_widths.push(0);
            self.busy.len() - 1
        });
        self.busy[slot] = true;
        self.slot_widths[slot] = self.slot_widths[slot].max(width);
        Place::Slot(slot)
    }
}
