//! The instructions of a step, and the buffers they act on.

use gpurun_types::{Bytes, DType, Lane, Place, Rank};
use serde::{Deserialize, Serialize};

use crate::spec::{FlatLayout, Micro, PlanOptions, UnitId};

/// Index of a buffer in [`RankPlan::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BufferId(pub u32);

/// Index of an instruction in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstrId(pub u32);

/// What a buffer is for; the line of the memory report that its bytes go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Weights in compute precision, whole or shard.
    Weights,
    /// Accumulated gradients, whole or shard.
    Gradients,
    /// fp32 master weights.
    Master,
    /// First moment.
    MomentM,
    /// Second moment.
    MomentV,
    /// Edges and saved tensors.
    Activations,
    /// Logits of the loss unit.
    Logits,
    /// Slots for gathered weights, transient gradients, streamed state.
    Communication,
    /// Scratch of one call.
    Workspace,
    /// Tokens, targets, document starts.
    Batch,
    /// Scalars, norm partials, losses.
    Scalars,
}

/// A named run of memory with one place in an arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    /// Name, for example `h.3/weights`.
    pub name: String,
    /// What it is for.
    pub kind: Kind,
    /// Which arena.
    pub place: Place,
    /// Elements.
    pub elements: usize,
    /// Element type.
    pub dtype: DType,
    /// Keeps its contents between steps. Otherwise it may share bytes with buffers of other lifetimes.
    pub persistent: bool,
    /// Offset in its arena, in bytes; set by the memory pass, a multiple of 256.
    pub offset: u64,
}

impl Buffer {
    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> Bytes {
        self.dtype.bytes(self.elements)
    }
}

/// Elements `start..start + len` of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// The buffer.
    pub buffer: BufferId,
    /// First element.
    pub start: usize,
    /// Elements.
    pub len: usize,
}

/// The group of ranks a collective runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Replicas of one stage.
    Data,
    /// All ranks.
    World,
}

/// What one unit's pass may touch: regions of weights and gradients are whole flat buffers of the unit itself, then of
/// each borrowed unit in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassIo {
    /// Flat weights: own, then borrowed.
    pub weights: Vec<Region>,
    /// Flat gradients: own, then borrowed. Empty in a forward.
    pub grads: Vec<Region>,
    /// Incoming edge.
    pub x: Option<Region>,
    /// Outgoing edge (forward).
    pub y: Option<Region>,
    /// Gradient of the outgoing edge (backward).
    pub dy: Option<Region>,
    /// Gradient of the incoming edge (backward).
    pub dx: Option<Region>,
    /// Saved tensors, in the unit's order.
    pub saved: Vec<Region>,
    /// Scratch tensors, in the unit's order.
    pub scratch: Vec<Region>,
    /// What the first part of a backward leaves for the second, in the unit's order. Empty in other passes.
    pub deferred: Vec<Region>,
    /// Tokens, targets, starts of the micro-batch.
    pub batch: [Region; 3],
    /// fp64 `[1]`: the micro-batch's summed loss. Only the loss unit touches it.
    pub loss: Option<Region>,
    /// The scalar state (loss scale). Only the loss unit reads it.
    pub scalars: Option<Region>,
}

/// Which part of a unit's backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// All of it.
    Whole,
    /// The gradient of the input; what the other part needs is left in `io.deferred`.
    Input,
    /// The gradients of the weights, after the other part.
    Weights,
}

/// What a message between stages carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Parcel {
    /// The edge out of the unit.
    Edge,
    /// The gradient of the edge out of the unit.
    EdgeGradient,
    /// The gradient of the unit's parameters that a replica of them summed.
    ReplicaGradient,
    /// The unit's new weights, for a replica of them.
    ReplicaWeights,
}

impl Parcel {
    /// In words, before the unit's name.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Edge => "output of",
            Self::EdgeGradient => "output gradient of",
            Self::ReplicaGradient => "replica's gradient of",
            Self::ReplicaWeights => "new weights of",
        }
    }
}

/// One unit's part of [`Op::Norm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NormPart {
    /// The unit.
    pub unit: UnitId,
    /// fp32 gradients.
    pub src: Region,
    /// fp64 `[1]`.
    pub dst: Region,
}

/// One unit's part of [`Op::Adam`]: its shard, or the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdamPart {
    /// The unit.
    pub unit: UnitId,
    /// First element of the unit's flat buffer that the regions cover: where parameters' bounds are counted from.
    pub first: usize,
    /// fp32 gradients.
    pub grad: Region,
    /// fp32 master weights; equal to `weight` when weights are fp32.
    pub master: Region,
    /// First moment.
    pub m: Region,
    /// Second moment.
    pub v: Region,
    /// Weights in compute precision; `None` when the master is the weight.
    pub weight: Option<Region>,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "op")]
pub enum Op {
    /// Host to device: tokens, targets and starts of a micro-batch, and in micro-batch 0 the step's learning rate.
    LoadBatch {
        /// Which micro-batch.
        micro: Micro,
        /// Tokens, targets, starts.
        batch: [Region; 3],
        /// fp32 `[1]`: learning rate, present in the first load of a step.
        learning_rate: Option<Region>,
    },
    /// Sets a region to zero.
    Zero {
        /// The region.
        dst: Region,
    },
    /// A unit's forward.
    Forward {
        /// The unit.
        unit: UnitId,
        /// The micro-batch.
        micro: Micro,
        /// True when this forward runs again in the backward phase.
        again: bool,
        /// What it touches.
        io: PassIo,
    },
    /// Computes again the saved tensors that selective recompute freed.
    Restore {
        /// The unit.
        unit: UnitId,
        /// The micro-batch.
        micro: Micro,
        /// Which of `io.saved` are filled.
        filled: Vec<usize>,
        /// What it touches.
        io: PassIo,
    },
    /// A unit's backward.
    Backward {
        /// The unit.
        unit: UnitId,
        /// The micro-batch.
        micro: Micro,
        /// Which part.
        part: Part,
        /// What it touches.
        io: PassIo,
    },
    /// Sum over the group, this rank's shard kept.
    ReduceScatter {
        /// The unit whose gradients these are.
        unit: UnitId,
        /// The group.
        group: Group,
        /// Whole buffer.
        src: Region,
        /// Shard.
        dst: Region,
        /// Add to the shard.
        accumulate: bool,
    },
    /// Every member's shard, in order.
    AllGather {
        /// The unit, or `None` for the scalars of the step.
        unit: Option<UnitId>,
        /// The group.
        group: Group,
        /// Shard; may lie inside `dst` at its place.
        src: Region,
        /// Whole buffer.
        dst: Region,
    },
    /// Adds fp32 gradients to others.
    Add {
        /// The unit.
        unit: UnitId,
        /// What is added.
        src: Region,
        /// What it is added to.
        dst: Region,
    },
    /// To a peer of the pipeline.
    Send {
        /// The peer.
        peer: Rank,
        /// What it carries, and of which unit.
        parcel: Parcel,
        /// The unit.
        unit: UnitId,
        /// The micro-batch.
        micro: Micro,
        /// What.
        src: Region,
    },
    /// From a peer of the pipeline.
    Recv {
        /// The peer.
        peer: Rank,
        /// What it carries, and of which unit.
        parcel: Parcel,
        /// The unit.
        unit: UnitId,
        /// The micro-batch.
        micro: Micro,
        /// Where to.
        dst: Region,
    },
    /// Sums of squares of gradient shards, each by itself. Many at once are few launches.
    Norm {
        /// The units' parts.
        parts: Vec<NormPart>,
    },
    /// Clip factor, skip decision, bias corrections, loss scale.
    Scalars {
        /// fp64 `[ranks, row]`: partials of every rank, zero where another stage computes them: units' sums of squares, then losses of the micro-batches.
        partials: Region,
        /// Elements of one row.
        row: usize,
        /// Leading elements of a row that are units' sums of squares.
        units: usize,
        /// fp32: learning rate.
        learning_rate: Region,
        /// fp32 scalar state.
        scalars: Region,
    },
    /// AdamW on units' shards (or wholes): of one unit where others wait for it, else of many, which are few launches.
    Adam {
        /// The units' parts.
        parts: Vec<AdamPart>,
        /// fp32 scalar state.
        scalars: Region,
        /// Where it runs.
        place: Place,
    },
    /// Copy between or within arenas (fetch, store, upload, download).
    Copy {
        /// The unit.
        unit: UnitId,
        /// From.
        src: Region,
        /// To; same length and type.
        dst: Region,
    },
}

/// One instruction: what, on which lane, after what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instr {
    /// What to do.
    pub op: Op,
    /// Lane it runs on.
    pub lane: Lane,
    /// Instructions on other lanes that must be done first; set by the waits pass, at most one per lane.
    pub waits: Vec<InstrId>,
}

/// A list of instructions. List order is a valid order of execution for this rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The instructions.
    pub instrs: Vec<Instr>,
}

/// Where the parts of a unit live on one rank, for initialisation and checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnitHome {
    /// The unit.
    pub unit: UnitId,
    /// Elements of flat buffer, padded, and of one shard.
    #[serde(skip, default = "FlatLayout::empty")]
    pub layout: FlatLayout,
    /// Weights in compute precision, and the first element of the flat buffer that the region covers.
    pub weight: (Region, usize),
    /// fp32 master weights (the weights themselves when they are fp32), and the first element covered.
    pub master: (Region, usize),
    /// First moment; covers the same elements as `master`.
    pub m: Region,
    /// Second moment; covers the same elements as `master`.
    pub v: Region,
}

impl FlatLayout {
    const fn empty() -> Self {
        Self { elements: 0, padded: 0, shard: 0 }
    }
}

/// Weights of a unit that another stage owns, for initialisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaHome {
    /// The unit.
    pub unit: UnitId,
    /// Weights in compute precision, and the first element of the flat buffer that the region covers.
    pub weight: (Region, usize),
}

/// The plan of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// Which rank.
    pub rank: Rank,
    /// All buffers.
    pub buffers: Vec<Buffer>,
    /// Size of the device arena.
    pub device_bytes: Bytes,
    /// Size of the host arena.
    pub host_bytes: Bytes,
    /// One training step.
    pub train: Program,
    /// Forward and loss of one micro-batch (its own `Micro(0)`), then the all-gather of the losses.
    pub evaluate: Program,
    /// Units of each chunk of this rank's stage, along the chain.
    pub chunks: Vec<std::ops::Range<u32>>,
    /// Units of this rank's stage.
    pub homes: Vec<UnitHome>,
    /// Units of other stages of which this rank holds the weights too.
    pub replicas: Vec<ReplicaHome>,
    /// fp32 scalar state.
    pub scalars: Region,
    /// fp64 `[ranks, row]` partials after the all-gather: where losses are read, see [`Op::Scalars`].
    pub partials: Region,
    /// Elements of one row of `partials`: units' sums of squares, then one loss for each micro-batch.
    pub row: usize,
    /// fp64 `[ranks]`: losses of an evaluation, after its all-gather.
    pub eval_losses: Region,
}

/// The plan of every rank, verified.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What it was built from.
    pub options: PlanOptions,
    /// One plan a rank.
    pub ranks: Vec<RankPlan>,
}
