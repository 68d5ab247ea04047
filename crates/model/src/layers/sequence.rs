use gpurun_device::{DeviceError, ScratchSizes};
use gpurun_types::{DType, View};

use super::places::{Assignment, Place, Places};
use super::scratch::{merge, serve};
use crate::layers::{BackwardIo, Capabilities, ForwardIo, Layer, RestoreIo, WeightsIo};
use crate::views::Split;
use crate::{BatchShape, Cx, ModelError, Param, Tensor};

/// What a [`Sequence`] keeps of the tensors between its layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Outputs of cheap layers (norms, activation functions) are computed again in the backward: a GPT-2 block keeps 9 times
    /// the width of a token instead of 15, for about one per cent more time.
    #[default]
    Lean,
    /// All are kept.
    Kept,
}

/// Layers one after the other.
///
/// The backward of each layer finds its input in a saved tensor, or computes it again from the one before, and hands its
/// gradient on through as few scratch slots as the layers' [`Capabilities`] allow.
pub struct Sequence {
    layers: Vec<Box<dyn Layer>>,
    /// Parameters and saved tensors of each layer.
    counts: Vec<(usize, usize)>,
    /// Number of tensors that each layer defers, where it has a backward in two parts.
    deferred: Vec<Option<usize>>,
    /// In forwards, and in a backward that is whole.
    whole: Places,
    /// In a backward of two parts.
    parts: Places,
    /// Width of each saved output.
    saved_widths: Vec<usize>,
    /// Width of each gradient that is kept for the second part.
    deferred_widths: Vec<usize>,
    /// Width of each scratch slot.
    slot_widths: Vec<usize>,
}

impl Sequence {
    /// In this order, [`Activations::Lean`]. See [`crate::layers!`].
    ///
    /// # Errors
    /// When there is no layer, or one layer's output width is not the next one's input width.
    pub fn new(layers: Vec<Box<dyn Layer>>) -> Result<Self, ModelError> {
        Self::with(layers, Activations::Lean)
    }

    /// In this order, keeping what `activations` says.
    ///
    /// # Errors
    /// As [`Sequence::new`].
    pub fn with(layers: Vec<Box<dyn Layer>>, activations: Activations) -> Result<Self, ModelError> {
        let fail = |problem: String| ModelError::Parts { part: "sequence".to_owned(), problem };
        if layers.is_empty() {
            return Err(fail("it has no layers; give it at least one".to_owned()));
        }
        for pair in layers.windows(2) {
            let (gives, takes) = (pair[0].output_width(), pair[1].input_width());
            if gives != takes {
                return Err(fail(format!(
                    "{} gives {gives} elements per token but {} takes {takes}; make the widths equal",
                    pair[0].describe(),
                    pair[1].describe()
                )));
            }
        }
        // The number of saved tensors does not depend on the batch: any shape counts them.
        let one = BatchShape { batch: 1, seq: 1 };
        let counts = layers.iter().map(|l| (l.params().len(), l.saved(one, DType::F32).len())).collect();
        let deferred: Vec<Option<usize>> =
            layers.iter().map(|l| l.deferred(one, DType::F32).map(|tensors| tensors.len())).collect();
        let whole = Assignment::of(&layers, activations, None);
        let parts = Assignment::of(&layers, activations, Some(&deferred));
        let slots = whole.slot_widths.len().max(parts.slot_widths.len());
        let width = |widths: &[usize], slot| widths.get(slot).copied().unwrap_or(0);
        let widest = |slot| width(&whole.slot_widths, slot).max(width(&parts.slot_widths, slot));
        Ok(Self {
            slot_widths: (0..slots).map(widest).collect(),
            saved_widths: whole.saved_widths,
            deferred_widths: parts.deferred_widths,
            whole: Places { between: whole.between, gradients: whole.gradients },
            parts: Places { between: parts.between, gradients: parts.gradients },
            layers,
            counts,
            deferred,
        })
    }

    fn last(&self) -> usize {
        self.layers.len() - 1
    }

    /// The output of layer `i` is kept, wider than both ends of the sequence (the inside of a feed-forward part), and made by
    /// a layer that keeps nothing itself: selective recompute lets it go. An element of a product's output takes as much
    /// arithmetic whatever its width, so the widest frees most memory for each kernel that runs again.
    fn restores(&self, i: usize) -> bool {
        let ends = self.input_width().max(self.output_width());
        let kept = matches!(self.whole.between.get(i), Some(Place::Saved(_)));
        kept && self.layers[i].output_width() > ends && self.counts[i].1 == 0
    }

    /// The views of the own slots, and the child contexts' scratch: what is left, shared by all layers.
    fn split_scratch<'a>(&self, cx: &Cx<'a>) -> (&'a [View], &'a [View]) {
        cx.scratch.split_at(self.slot_widths.len())
    }

    fn child_scratch(&self, cx: &Cx<'_>) -> Vec<Vec<View>> {
        let lists = self.child_lists(cx.backend, cx.shape, cx.dtype);
        let pool = merge(&lists);
        let views = self.split_scratch(cx).1;
        lists.iter().map(|list| serve(&pool, views, list)).collect()
    }

    fn child_lists(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Vec<Tensor>> {
        self.layers.iter().map(|l| l.scratch(sizes, shape, dtype)).collect()
    }

    fn cut<'a>(&self, views: &'a [View], count: impl Fn(&(usize, usize)) -> usize) -> Vec<&'a [View]> {
        let mut split = Split::new(views);
        self.counts.iter().map(|c| split.take(count(c))).collect()
    }

    /// The own deferred tensors, and those of each layer.
    fn cut_deferred<'a>(&self, views: &'a [View]) -> (&'a [View], Vec<&'a [View]>) {
        let (own, rest) = views.split_at(self.deferred_widths.len());
        let mut split = Split::new(rest);
        (own, self.deferred.iter().map(|count| split.take(count.unwrap_or(0))).collect())
    }

    /// The view of `width` elements a token at `place`.
    fn at(&self, cx: &Cx<'_>, [saved, deferred]: [&[View]; 2], place: Place, width: usize) -> View {
        let whole = match place {
            Place::Saved(i) => saved[i],
            Place::Slot(i) => cx.scratch[i],
            Place::Deferred(i) => deferred[i],
        };
        whole.slice(0, cx.shape.tokens() * width)
    }

    /// The backward, or with `deferred` its first part.
    fn run_backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>, deferred: Option<&[View]>) -> Result<(), DeviceError> {
        let (own_saved, saved) = io.saved.split_at(self.saved_widths.len());
        let (weights, saved) = (self.cut(io.weights, |c| c.0), self.cut(saved, |c| c.1));
        let grads = self.cut(io.grads, |c| c.0);
        let (own_deferred, left) = deferred.map(|views| self.cut_deferred(views)).unzip();
        let places = if deferred.is_some() { &self.parts } else { &self.whole };
        let own = [own_saved, own_deferred.unwrap_or_default()];
        let scratch = self.child_scratch(cx);
        let child = |i: usize| Cx { scratch: &scratch[i], ..*cx };
        // Output of layer `i - 1`, which is the input of layer `i`.
        let input = |i: usize| match i {
            0 => io.x,
            _ => self.at(cx, own, places.between[i - 1], self.layers[i].input_width()),
        };
        let mut dy = io.dy;
        for (i, layer) in self.layers.iter().enumerate().rev() {
            let x = input(i);
            let unread = deferred.is_some() && layer.capabilities().input_without_x;
            if i > 0 && matches!(places.between[i - 1], Place::Slot(_)) && !unread {
                let again =
                    ForwardIo { weights: weights[i - 1], x: input(i - 1), y: x, add: None, saved: saved[i - 1] };
                self.layers[i - 1].forward(&child(i - 1), again)?;
            }
            let (dx, carry) = match i {
                0 => (io.dx, io.carry),
                _ => (self.at(cx, own, places.gradients[i - 1], layer.input_width()), None),
            };
            let part = BackwardIo { weights: weights[i], grads: grads[i], x, dy, dx, carry, saved: saved[i] };
            match &left {
                None => layer.backward(&child(i), part)?,
                Some(left) => layer.backward_input(&child(i), part, left[i])?,
            }
            dy = dx;
        }
        Ok(())
    }
}

impl Layer for Sequence {
    fn describe(&self) -> String {
        let parts: Vec<String> = self.layers.iter().map(|l| l.describe()).collect();
        format!("[{}]", parts.join(", "))
    }

    fn input_width(&self) -> usize {
        self.layers[0].input_width()
    }

    fn output_width(&self) -> usize {
        self.layers[self.last()].output_width()
    }

    fn params(&self) -> Vec<Param> {
        self.layers.iter().flat_map(|l| l.params()).collect()
    }

    fn saved(&self, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        let own = self.saved_widths.iter().map(|w| Tensor { name: "hidden", elements: shape.tokens() * w, dtype });
        own.chain(self.layers.iter().flat_map(|l| l.saved(shape, dtype))).collect()
    }

    /// Own outputs first (see `restores`), then what the layers restore of theirs.
    fn restorable(&self) -> Vec<usize> {
        let own = (0..self.last()).filter(|&i| self.restores(i)).filter_map(|i| match self.whole.between[i] {
            Place::Saved(at) => Some(at),
            Place::Slot(_) | Place::Deferred(_) => None,
        });
        let mut all: Vec<usize> = own.collect();
        let mut first = self.saved_widths.len();
        for (layer, (_, saved)) in self.layers.iter().zip(&self.counts) {
            all.extend(layer.restorable().into_iter().map(|at| first + at));
            first += saved;
        }
        all
    }

    fn restore_flops_per_token(&self, seq: usize) -> f64 {
        let mut flops = 0.0;
        for (i, layer) in self.layers.iter().enumerate() {
            flops += layer.restore_flops_per_token(seq);
            if self.restores(i) {
                flops += layer.forward_flops_per_token(seq);
            }
        }
        flops
    }

    fn restore(&self, cx: &Cx<'_>, io: RestoreIo<'_>) -> Result<(), DeviceError> {
        let (own, saved) = io.saved.split_at(self.saved_widths.len());
        let (weights, saved) = (self.cut(io.weights, |c| c.0), self.cut(saved, |c| c.1));
        let scratch = self.child_scratch(cx);
        let child = |i: usize| Cx { scratch: &scratch[i], ..*cx };
        let output = |i: usize| self.at(cx, [own, &[]], self.whole.between[i], self.layers[i].output_width());
        let input = |i: usize| if i == 0 { io.x } else { output(i - 1) };
        let forward = |i: usize| {
            let again = ForwardIo { weights: weights[i], x: input(i), y: output(i), add: None, saved: saved[i] };
            self.layers[i].forward(&child(i), again)
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let inner = !layer.restorable().is_empty();
            // A cheap layer's output was kept nowhere; what it is made of was.
            if (inner || self.restores(i)) && i > 0 && matches!(self.whole.between[i - 1], Place::Slot(_)) {
                forward(i - 1)?;
            }
            if inner {
                layer.restore(&child(i), RestoreIo { weights: weights[i], x: input(i), saved: saved[i] })?;
            }
            if self.restores(i) {
                forward(i)?;
            }
        }
        Ok(())
    }

    fn scratch(&self, sizes: &dyn ScratchSizes, shape: BatchShape, dtype: DType) -> Vec<Tensor> {
        let own = self.slot_widths.iter().map(|w| Tensor { name: "between", elements: shape.tokens() * w, dtype });
        own.chain(merge(&self.child_lists(sizes, shape, dtype))).collect()
    }

    fn forward_flops_per_token(&self, seq: usize) -> f64 {
        self.layers.iter().map(|l| l.forward_flops_per_token(seq)).sum()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            add: self.layers[self.last()].capabilities().add,
            carry: self.layers[0].capabilities().carry,
            ..Capabilities::default()
        }
    }

    fn forward(&self, cx: &Cx<'_>, io: ForwardIo<'_>) -> Result<(), DeviceError> {
        let (own, saved) = io.saved.split_at(self.saved_widths.len());
        let (weights, saved) = (self.cut(io.weights, |c| c.0), self.cut(saved, |c| c.1));
        let scratch = self.child_scratch(cx);
        let mut x = io.x;
        for (i, layer) in self.layers.iter().enumerate() {
            let (y, add) = match self.whole.between.get(i) {
                Some(&place) => (self.at(cx, [own, &[]], place, layer.output_width()), None),
                None => (io.y, io.add),
            };
            let child = Cx { scratch: &scratch[i], ..*cx };
            layer.forward(&child, ForwardIo { weights: weights[i], x, y, add, saved: saved[i] })?;
            x = y;
        }
        Ok(())
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        self.run_backward(cx, io, None)
    }

    /// Gradients of outputs of layers that have a second part, then what the layers defer.
    fn deferred(&self, shape: BatchShape, dtype: DType) -> Option<Vec<Tensor>> {
        if self.deferred.iter().all(Option::is_none) {
            return None;
        }
        let gradient = |width| Tensor { name: "hidden gradient", elements: shape.tokens() * width, dtype };
        let own = self.deferred_widths.iter().map(gradient);
        Some(own.chain(self.layers.iter().filter_map(|l| l.deferred(shape, dtype)).flatten()).collect())
    }

    fn weights_flops_per_token(&self) -> f64 {
        self.layers.iter().map(|l| l.weights_flops_per_token()).sum()
    }

    fn backward_input(&self, cx: &Cx<'_>, io: BackwardIo<'_>, deferred: &[View]) -> Result<(), DeviceError> {
        self.run_backward(cx, io, Some(deferred))
    }

    fn backward_weights(&self, cx: &Cx<'_>, io: WeightsIo<'_>) -> Result<(), DeviceError> {
        let (own_saved, saved) = io.saved.split_at(self.saved_widths.len());
        let (weights, saved) = (self.cut(io.weights, |c| c.0), self.cut(saved, |c| c.1));
        let grads = self.cut(io.grads, |c| c.0);
        let (own_deferred, left) = self.cut_deferred(io.deferred);
        let own = [own_saved, own_deferred];
        let scratch = self.child_scratch(cx);
        let child = |i: usize| Cx { scratch: &scratch[i], ..*cx };
        let output = |i: usize, places: &[Place]| self.at(cx, own, places[i], self.layers[i].output_width());
        let input = |i: usize| if i == 0 { io.x } else { output(i - 1, &self.parts.between) };
        for (i, layer) in self.layers.iter().enumerate().rev().filter(|(i, _)| self.deferred[*i].is_some()) {
            let x = input(i);
            if i > 0 && matches!(self.parts.between[i - 1], Place::Slot(_)) {
                let again =
                    ForwardIo { weights: weights[i - 1], x: input(i - 1), y: x, add: None, saved: saved[i - 1] };
                self.layers[i - 1].forward(&child(i - 1), again)?;
            }
            let dy = if i == self.last() { io.dy } else { output(i, &self.parts.gradients) };
            let part = WeightsIo { weights: weights[i], grads: grads[i], x, dy, saved: saved[i], deferred: left[i] };
            layer.backward_weights(&child(i), part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers;
    use crate::layers::{Gelu, Linear, Norm, SwiGlu};

    #[test]
    fn a_gpt2_mlp_keeps_one_tensor_and_uses_two_slots() {
        let _limit = testkit::time_limit(10);
        let parts =
            || layers![Norm::layer("n", 8, 1e-5), Linear::new("a", 8, 32), Gelu::new(32), Linear::new("b", 32, 8)];
        let lean = Sequence::new(parts()).unwrap();
        assert_eq!((lean.saved_widths.as_slice(), lean.slot_widths.as_slice()), (&[32][..], &[32, 8][..]));
        assert_eq!(lean.whole.gradients, [Place::Slot(1), Place::Slot(0), Place::Slot(0)]);
        let kept = Sequence::with(parts(), Activations::Kept).unwrap();
        // One slot, for a backward in two parts, which writes over no saved tensor.
        assert_eq!((kept.saved_widths.as_slice(), kept.slot_widths.as_slice()), (&[8, 32, 32][..], &[32][..]));
    }

    #[test]
    fn a_swiglu_mlp_writes_the_gate_gradient_over_the_gate() {
        let _limit = testkit::time_limit(10);
        let parts = layers![Norm::rms("n", 8, 1e-5), Linear::new("a", 8, 48), SwiGlu::new(24), Linear::new("b", 24, 8)];
        let lean = Sequence::new(parts).unwrap();
        assert_eq!((lean.saved_widths.as_slice(), lean.slot_widths.as_slice()), (&[48][..], &[24][..]));
        assert_eq!(lean.whole.gradients, [Place::Slot(0), Place::Saved(0), Place::Slot(0)]);
    }

    #[test]
    fn of_two_cheap_layers_the_first_is_kept_out_of_two_recomputed() {
        let _limit = testkit::time_limit(10);
        let parts = layers![Norm::rms("n", 8, 1e-5), Gelu::new(8), Gelu::new(8), Linear::new("b", 8, 8)];
        let lean = Sequence::new(parts).unwrap();
        assert!(
            matches!(lean.whole.between[..], [Place::Slot(_), Place::Saved(0), Place::Slot(_)]),
            "{:?}",
            lean.whole.between
        );
    }

    #[test]
    fn widths_that_do_not_meet_are_refused_by_name() {
        let _limit = testkit::time_limit(10);
        let error = Sequence::new(layers![Linear::new("a", 8, 32), Gelu::new(16)]).err().unwrap().to_string();
        assert!(error.contains("linear a gives 32") && error.contains("gelu takes 16"), "{error}");
        assert!(Sequence::new(Vec::new()).is_err());
    }
}
