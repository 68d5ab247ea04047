//! What a plan is made from: the model's sizes and the choices of the user.

use gpurun_types::{Bytes, DType, Place};
use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// Index of a unit in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnitId(pub u32);

/// Index of a micro-batch within a step, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Micro(pub u32);

/// A named amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedTensor {
    /// Name for reports.
    pub name: String,
    /// Elements.
    pub elements: usize,
    /// Element type.
    pub dtype: DType,
}

/// One parameter, as the plan sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// Full name.
    pub name: String,
    /// Elements.
    pub elements: usize,
    /// Weight decay applies.
    pub decay: bool,
}

/// One unit, as the plan sees it, for one micro-batch shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnitSpec {
    /// Name.
    pub name: String,
    /// Own parameters, in flat-buffer order.
    pub params: Vec<ParamSpec>,
    /// Units whose parameters this one also uses (tied embeddings), without repetition.
    pub borrows: Vec<UnitId>,
    /// Elements of the incoming edge of one micro-batch; 0 for the first unit.
    pub input: usize,
    /// Elements of the outgoing edge; 0 for the loss unit.
    pub output: usize,
    /// Kept from forward to backward.
    pub saved: Vec<NamedTensor>,
    /// Which of `saved` can be computed again from the input and the others, ascending.
    pub restorable: Vec<usize>,
    /// Needed during one call.
    pub scratch: Vec<NamedTensor>,
    /// Floating-point operations of one forward of one micro-batch.
    pub forward_flops: f64,
    /// Floating-point operations that computing `restorable` again takes.
    pub restore_flops: f64,
    /// The backward can be run in two parts: the gradient of the input, then those of the weights.
    pub splits: bool,
    /// What the first part of a backward leaves for the second.
    pub deferred: Vec<NamedTensor>,
    /// Floating-point operations of the second part.
    pub weights_flops: f64,
}

impl UnitSpec {
    /// Parameters' elements, without gaps.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.params.iter().map(|p| p.elements).sum()
    }

    /// The unit's flat buffer, cut over `shards` ranks.
    #[must_use]
    pub fn layout(&self, shards: u32) -> FlatLayout {
        FlatLayout::new(param_starts(self.params.iter().map(|p| p.elements)).1, shards)
    }
}

/// The model for one micro-batch shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The chain. The first has no input, the last (the loss unit) no output.
    pub units: Vec<UnitSpec>,
    /// Tokens of one micro-batch.
    pub tokens: usize,
}

/// How ranks are arranged: `pp` stages of `dp` replicas. Rank = `stage * dp + replica`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// Data-parallel replicas of each stage.
    pub dp: u32,
    /// Pipeline stages.
    pub pp: u32,
}

/// One kind of state: whole on every rank, or cut over the data-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Whole on every rank.
    Replicated,
    /// Cut into equal shards over the data-parallel group.
    Sharded,
}

/// Layout and place of one kind of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Residence {
    /// Whole or cut.
    pub layout: Layout,
    /// Device or host.
    pub place: Place,
}

/// Where parameters, gradients and optimizer state live: the whole of ZeRO and offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Parameters in compute precision.
    pub param: Residence,
    /// Accumulated gradients.
    pub grad: Residence,
    /// Master weights and Adam's moments.
    pub optim: Residence,
}

/// Who runs Adam when its state is on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OffloadVia {
    /// Gradients go down, the host steps, weights go up.
    Host,
    /// State passes through the device in two slots.
    Stream,
}

/// What is computed again in the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing: all saved tensors are kept.
    None,
    /// Tensors that units can restore are freed after the forward and computed again just before the backward.
    Selective,
    /// Every unit between first and last runs its forward again just before its backward.
    Full,
}

/// Everything that shapes a plan besides the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// Arrangement of ranks.
    pub mesh: Mesh,
    /// Micro-batches per rank and step.
    pub micro_batches: u32,
    /// Layout and place of state.
    pub policy: Policy,
    /// Type of weights and activations. With `F32` the weights are their own master.
    pub dtype: DType,
    /// Type of Adam's moments: `F32` or `Bf16`.
    pub adam_dtype: DType,
    /// Who runs a host-side Adam.
    pub offload_via: OffloadVia,
    /// Share of units whose optimizer state is on the host when `policy.optim.place` is the host, `0.0..=1.0`.
    pub offload_fraction: f64,
    /// What is computed again.
    pub recompute: Recompute,
    /// Order of micro-batches; with one stage gpipe is one forward, one backward too.
    pub schedule: Schedule,
    /// Units of each chunk in the order of the chain, or layers: then the first and the last unit are counted with their
    /// neighbours. `None` balances the chunks by cost.
    pub split: Option<Vec<u32>>,
}

impl PlanOptions {
    /// How many of a stage's `units`, its last ones, have their optimizer state on the host.
    #[must_use]
    pub fn units_on_host(&self, units: usize) -> usize {
        match self.policy.optim.place {
            Place::Host => (self.offload_fraction * units as f64).round() as usize,
            Place::Device => 0,
        }
    }
}

/// Elements that every shard is a multiple of, so that each shard starts on a 256-byte boundary in any type.
pub const SHARD_ALIGN: usize = 128;

/// Elements that each parameter's start in its unit's flat buffer is a multiple of: 16 bytes in any type. Parameters whose
/// sizes are multiples of this lie side by side, so that a unit may treat q, k and v as one matrix.
pub const PARAM_ALIGN: usize = 8;

/// Start of each parameter in its unit's flat buffer, in elements, and the end of the last one (unpadded).
#[must_use]
pub fn param_starts(sizes: impl IntoIterator<Item = usize>) -> (Vec<usize>, usize) {
    let mut starts = Vec::new();
    let mut end = 0;
    for size in sizes {
        starts.push(end);
        end = (end + size).next_multiple_of(PARAM_ALIGN);
    }
    (starts, end)
}

/// The flat buffer of a unit: its parameters one after the other, padded so that it cuts into equal, aligned shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatLayout {
    /// Elements of the parameters, gaps between them included.
    pub elements: usize,
    /// Elements of the whole buffer.
    pub padded: usize,
    /// Elements of one shard; `padded / shards`.
    pub shard: usize,
}

impl FlatLayout {
    /// The layout of `elements` parameters over `shards` ranks.
    #[must_use]
    pub fn new(elements: usize, shards: u32) -> Self {
        let shards = shards as usize;
        let shard = elements.div_ceil(shards).div_ceil(SHARD_ALIGN).max(1) * SHARD_ALIGN;
        Self { elements, padded: shard * shards, shard }
    }
}

/// Bytes that `elements` of `dtype` take.
#[must_use]
pub const fn bytes_of(elements: usize, dtype: DType) -> Bytes {
    dtype.bytes(elements)
}
