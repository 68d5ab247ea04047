use gpurun_device::{DeviceError, ScratchSizes};
use gpurun_types::{DType, View};

use super::scratch::{merge, serve};
use crate::layers::{BackwardIo, Capabilities, ForwardIo, Layer, RestoreIo};
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

/// Where a tensor between two layers lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the sequence's own saved tensors.
    Saved(usize),
    /// In the sequence's own scratch.
    Slot(usize),
}

/// Layers one after the other.
///
/// The backward of each layer finds its input in a saved tensor, or computes it again from the one before, and hands its
/// gradient on through as few scratch slots as the layers' [`Capabilities`] allow.
pub struct Sequence {
    layers: Vec<Box<dyn Layer>>,
    /// Parameters and saved tensors of each layer.
    counts: Vec<(usize, usize)>,
    /// Where the output of each layer but the last lives.
    between: Vec<Place>,
    /// Where the gradient of that output goes.
    gradients: Vec<Place>,
    /// Width of each saved output.
    saved_widths: Vec<usize>,
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
        Ok(Assignment::of(&layers, activations).into_sequence(layers, counts))
    }

    fn last(&self) -> usize {
        self.layers.len() - 1
    }

    /// The output of layer `i` is kept, wider than both ends of the sequence (the inside of a feed-forward part), and made by
    /// a layer that keeps nothing itself: selective recompute lets it go. An element of a product's output takes as much
    /// arithmetic whatever its width, so the widest frees most memory for each kernel that runs again.
    fn restores(&self, i: usize) -> bool {
        let ends = self.input_width().max(self.output_width());
        let kept = matches!(self.between.get(i), Some(Place::Saved(_)));
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

    /// The view of `width` elements a token at `place`.
    fn at(&self, cx: &Cx<'_>, own_saved: &[View], place: Place, width: usize) -> View {
        let whole = match place {
            Place::Saved(i) => own_saved[i],
            Place::Slot(i) => cx.scratch[i],
        };
        whole.slice(0, cx.shape.tokens() * width)
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
        let own = (0..self.last()).filter(|&i| self.restores(i)).filter_map(|i| match self.between[i] {
            Place::Saved(at) => Some(at),
            Place::Slot(_) => None,
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
        let output = |i: usize| self.at(cx, own, self.between[i], self.layers[i].output_width());
        let input = |i: usize| if i == 0 { io.x } else { output(i - 1) };
        let forward = |i: usize| {
            let again = ForwardIo { weights: weights[i], x: input(i), y: output(i), add: None, saved: saved[i] };
            self.layers[i].forward(&child(i), again)
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let inner = !layer.restorable().is_empty();
            // A cheap layer's output was kept nowhere; what it is made of was.
            if (inner || self.restores(i)) && i > 0 && matches!(self.between[i - 1], Place::Slot(_)) {
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
            let (y, add) = match self.between.get(i) {
                Some(&place) => (self.at(cx, own, place, layer.output_width()), None),
                None => (io.y, io.add),
            };
            let child = Cx { scratch: &scratch[i], ..*cx };
            layer.forward(&child, ForwardIo { weights: weights[i], x, y, add, saved: saved[i] })?;
            x = y;
        }
        Ok(())
    }

    fn backward(&self, cx: &Cx<'_>, io: BackwardIo<'_>) -> Result<(), DeviceError> {
        let (own, saved) = io.saved.split_at(self.saved_widths.len());
        let (weights, saved) = (self.cut(io.weights, |c| c.0), self.cut(saved, |c| c.1));
        let grads = self.cut(io.grads, |c| c.0);
        let scratch = self.child_scratch(cx);
        let child = |i: usize| Cx { scratch: &scratch[i], ..*cx };
        // Output of layer `i - 1`, which is the input of layer `i`.
        let input = |i: usize| match i {
            0 => io.x,
            _ => self.at(cx, own, self.between[i - 1], self.layers[i].input_width()),
        };
        let mut dy = io.dy;
        for (i, layer) in self.layers.iter().enumerate().rev() {
            let x = input(i);
            if i > 0 && matches!(self.between[i - 1], Place::Slot(_)) {
                let again =
                    ForwardIo { weights: weights[i - 1], x: input(i - 1), y: x, add: None, saved: saved[i - 1] };
                self.layers[i - 1].forward(&child(i - 1), again)?;
            }
            let (dx, carry) = match i {
                0 => (io.dx, io.carry),
                _ => (self.at(cx, own, self.gradients[i - 1], layer.input_width()), None),
            };
            let part = BackwardIo { weights: weights[i], grads: grads[i], x, dy, dx, carry, saved: saved[i] };
            layer.backward(&child(i), part)?;
            dy = dx;
        }
        Ok(())
    }
}

/// Places tensors between layers, by walking the backward once.
struct Assignment {
    between: Vec<Place>,
    gradients: Vec<Place>,
    saved_widths: Vec<usize>,
    slot_widths: Vec<usize>,
    busy: Vec<bool>,
}

impl Assignment {
    fn of(layers: &[Box<dyn Layer>], activations: Activations) -> Self {
        let gaps = layers.len() - 1;
        let mut this = Self {
            between: Vec::with_capacity(gaps),
            gradients: vec![Place::Slot(usize::MAX); gaps],
            saved_widths: Vec::new(),
            slot_widths: Vec::new(),
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
        this.walk_backward(layers);
        this
    }

    fn walk_backward(&mut self, layers: &[Box<dyn Layer>]) {
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
            let over_dy = dy.filter(|_| can.dx_over_dy && layer.output_width() == width);
            let dx = match over_dy {
                _ if can.dx_over_x => x,
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

    fn into_sequence(self, layers: Vec<Box<dyn Layer>>, counts: Vec<(usize, usize)>) -> Sequence {
        Sequence {
            layers,
            counts,
            between: self.between,
            gradients: self.gradients,
            saved_widths: self.saved_widths,
            slot_widths: self.slot_widths,
        }
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
        assert_eq!(lean.gradients, [Place::Slot(1), Place::Slot(0), Place::Slot(0)]);
        let kept = Sequence::with(parts(), Activations::Kept).unwrap();
        assert_eq!((kept.saved_widths.as_slice(), kept.slot_widths.len()), (&[8, 32, 32][..], 0));
    }

    #[test]
    fn a_swiglu_mlp_writes_the_gate_gradient_over_the_gate() {
        let _limit = testkit::time_limit(10);
        let parts = layers![Norm::rms("n", 8, 1e-5), Linear::new("a", 8, 48), SwiGlu::new(24), Linear::new("b", 24, 8)];
        let lean = Sequence::new(parts).unwrap();
        assert_eq!((lean.saved_widths.as_slice(), lean.slot_widths.as_slice()), (&[48][..], &[24][..]));
        assert_eq!(lean.gradients, [Place::Slot(0), Place::Saved(0), Place::Slot(0)]);
    }

    #[test]
    fn of_two_cheap_layers_the_first_is_kept_out_of_two_recomputed() {
        let _limit = testkit::time_limit(10);
        let parts = layers![Norm::rms("n", 8, 1e-5), Gelu::new(8), Gelu::new(8), Linear::new("b", 8, 8)];
        let lean = Sequence::new(parts).unwrap();
        assert!(matches!(lean.between[..], [Place::Slot(_), Place::Saved(0), Place::Slot(_)]), "{:?}", lean.between);
    }

    #[test]
    fn widths_that_do_not_meet_are_refused_by_name() {
        let _limit = testkit::time_limit(10);
        let error = Sequence::new(layers![Linear::new("a", 8, 32), Gelu::new(16)]).err().unwrap().to_string();
        assert!(error.contains("linear a gives 32") && error.contains("gelu takes 16"), "{error}");
        assert!(Sequence::new(Vec::new()).is_err());
    }
}
