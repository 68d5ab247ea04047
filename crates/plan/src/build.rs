//! From a model and options to the verified plan of every rank.

use gpurun_types::{Bytes, DType, Lane, Place, Rank};

use crate::error::PlanError;
use crate::ir::{Buffer, BufferId, Group, Instr, Kind, Op, Plan, Program, RankPlan, Region, UnitHome};
use crate::lower::{self, Lowered};
use crate::spec::{FlatLayout, Layout, ModelSpec, PlanOptions, UnitId};
use crate::stages::Placement;
use crate::steps::Pipeline;
use crate::{memory, steps, verify, waits};

/// fp32 elements of the scalar state (see the backend's `ScalarSlot`).
const SCALARS: usize = 16;

impl Plan {
    /// The plan of every rank: passes, memory, waits, and the proof that they fit together.
    ///
    /// # Errors
    /// When settings cannot be, or cannot go together.
    pub fn build(spec: &ModelSpec, options: &PlanOptions) -> Result<Self, PlanError> {
        let pipeline = pipeline(spec, options)?;
        let mut ranks: Vec<RankPlan> = Vec::new();
        for rank in 0..options.mesh.dp * options.mesh.pp {
            let mut plan = Builder::new(spec, options, &pipeline, Rank(rank)).build();
            // Buffers and lifetimes are the same on every replica of a stage; only the places within them differ.
            match ranks.get((rank / options.mesh.dp * options.mesh.dp) as usize) {
                None => place(&mut plan),
                Some(first) => copy_places(first, &mut plan),
            }
            waits::derive(&plan.buffers, &mut plan.train.instrs);
            waits::derive(&plan.buffers, &mut plan.evaluate.instrs);
            ranks.push(plan);
        }
        let plan = Self { options: options.clone(), ranks };
        verify::verify(&plan)?;
        Ok(plan)
    }
}

/// What a search needs of a plan: the first replica of each stage, whose fellows hold and do the same. Not verified: what a
/// search chooses is built whole before it runs.
pub struct Sketch {
    /// What it was built from.
    pub options: PlanOptions,
    /// One plan a stage.
    pub stages: Vec<RankPlan>,
}

impl Sketch {
    /// The plans of the first replicas.
    ///
    /// # Errors
    /// As [`Plan::build`], but for verification.
    pub fn build(spec: &ModelSpec, options: &PlanOptions) -> Result<Self, PlanError> {
        let pipeline = pipeline(spec, options)?;
        let first = |stage: u32| {
            let mut plan = Builder::new(spec, options, &pipeline, Rank(stage * options.mesh.dp)).build();
            place(&mut plan);
            waits::derive(&plan.buffers, &mut plan.train.instrs);
            plan
        };
        Ok(Self { options: options.clone(), stages: (0..options.mesh.pp).map(first).collect() })
    }

    /// The stage that holds most in device memory.
    ///
    /// # Panics
    /// Never: there is at least one stage.
    #[must_use]
    pub fn largest(&self) -> &RankPlan {
        self.stages.iter().max_by_key(|s| s.device_bytes).expect("at least one stage")
    }

    /// Host memory of the rank that needs most of it.
    #[must_use]
    pub fn largest_on_host(&self) -> Bytes {
        self.stages.iter().map(|s| s.host_bytes).max().unwrap_or_default()
    }

    /// Units of the stage that has most.
    #[must_use]
    pub fn most_units(&self) -> usize {
        self.stages.iter().map(|s| s.homes.len()).max().unwrap_or_default()
    }
}

/// Who does what when, for options that can be.
fn pipeline(spec: &ModelSpec, options: &PlanOptions) -> Result<Pipeline, PlanError> {
    Ok(Pipeline::new(placement(spec, options)?, options))
}

/// Who has what, for options that can be.
pub(crate) fn placement(spec: &ModelSpec, options: &PlanOptions) -> Result<Placement, PlanError> {
    check(spec, options)?;
    Placement::new(spec, options)
}

/// Whether parameters, gradients and optimizer state are cut over replicas. One replica's shard is the whole.
pub(crate) fn sharded(options: &PlanOptions) -> [bool; 3] {
    let policy = options.policy;
    [policy.param, policy.grad, policy.optim].map(|r| options.mesh.dp > 1 && r.layout == Layout::Sharded)
}

fn check(spec: &ModelSpec, options: &PlanOptions) -> Result<(), PlanError> {
    let setting = |setting, problem: String| Err(PlanError::Setting { setting, problem });
    if spec.units.len() < 2 {
        return Err(PlanError::Model(format!("{} units; a chain has at least two", spec.units.len())));
    }
    if options.mesh.dp == 0 {
        return setting("ranks", "there must be at least one".to_owned());
    }
    if options.mesh.pp == 0 {
        return setting("pp", "there must be at least one stage".to_owned());
    }
    let (pp, chunks, units) = (options.mesh.pp, options.schedule.chunks(), spec.units.len());
    if chunks == 0 {
        return setting("pp-chunks", "each stage needs at least one".to_owned());
    }
    if u64::from(pp) * u64::from(chunks) > units as u64 {
        let (first, problem) = match chunks {
            1 => (format!("pp {pp}"), format!("each stage needs a unit of its own; use 1 to {units} stages")),
            _ => {
                let most = units / pp as usize;
                let fewer = if most > 0 { format!("use at most {most} chunks") } else { "use fewer stages".to_owned() };
                (
                    format!("pp {pp} with {chunks} chunks a stage"),
                    format!("each chunk needs a unit of its own; {fewer}"),
                )
            }
        };
        return Err(PlanError::Together { first, second: format!("a model of {units} units"), problem });
    }
    if options.micro_batches == 0 {
        return setting("micro-batches", "there must be at least one".to_owned());
    }
    if !(0.0..=1.0).contains(&options.offload_fraction) {
        return setting("offload-fraction", format!("{} is not between 0 and 1", options.offload_fraction));
    }
    if !matches!(options.adam_dtype, DType::F32 | DType::Bf16) {
        return setting("adam-dtype", format!("moments cannot be {}; use fp32 or bf16", options.adam_dtype));
    }
    for (what, residence) in [("param", options.policy.param), ("grad", options.policy.grad)] {
        if residence.place == Place::Host {
            return setting(what, "can only be on the device; optimizer state can be on the host".to_owned());
        }
    }
    let sharded = |r: crate::spec::Residence| r.layout == Layout::Sharded;
    let (param, grad, optim) = (options.policy.param, options.policy.grad, options.policy.optim);
    if sharded(param) && !sharded(grad) || sharded(grad) && !sharded(optim) {
        return Err(PlanError::Together {
            first: "a policy that shards parameters or gradients".to_owned(),
            second: "one that replicates gradients or optimizer state".to_owned(),
            problem: "shard optimizer state first, then gradients, then parameters (ZeRO 1, 2, 3)".to_owned(),
        });
    }
    if let Some(last) = spec.units.last().filter(|u| !u.saved.is_empty()) {
        return Err(PlanError::Model(format!("{} is the loss unit and keeps tensors; it can keep none", last.name)));
    }
    for (index, unit) in spec.units.iter().enumerate() {
        if unit.splits && (index == 0 || index + 1 == spec.units.len() || !unit.borrows.is_empty()) {
            let problem = "splits its backward, and so can no end of the chain or unit that borrows parameters";
            return Err(PlanError::Model(format!("unit {} {problem}", unit.name)));
        }
        let ascending = unit.restorable.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || unit.restorable.last().is_some_and(|at| *at >= unit.saved.len()) {
            let problem = format!("unit {} restores tensors {:?} of {}", unit.name, unit.restorable, unit.saved.len());
            return Err(PlanError::Model(problem));
        }
        for borrowed in &unit.borrows {
            if borrowed.0 as usize >= spec.units.len() || borrowed.0 as usize == index {
                return Err(PlanError::Model(format!("unit {} borrows from unit {}", unit.name, borrowed.0)));
            }
        }
    }
    Ok(())
}

fn place(plan: &mut RankPlan) {
    let [device, host] = memory::place(&mut plan.buffers, &[&plan.train, &plan.evaluate]);
    (plan.device_bytes, plan.host_bytes) = (device, host);
}

fn copy_places(from: &RankPlan, to: &mut RankPlan) {
    for (a, b) in from.buffers.iter().zip(&mut to.buffers) {
        debug_assert_eq!((&a.name, a.bytes()), (&b.name, b.bytes()), "replicas have the same buffers");
        b.offset = a.offset;
    }
    (to.device_bytes, to.host_bytes) = (from.device_bytes, from.host_bytes);
}

/// What the passes of one rank share.
pub(crate) struct Builder<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) options: &'a PlanOptions,
    /// Index in the data-parallel group.
    pub(crate) replica: usize,
    pub(crate) dp: u32,
    /// Index of this rank's stage.
    pub(crate) stage: u32,
    /// This rank's units, along the chain.
    pub(crate) units: Vec<UnitId>,
    pipeline: &'a Pipeline,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) instrs: Vec<Instr>,
    /// Persistent weights: whole or shard.
    pub(crate) weights: Vec<Region>,
    pub(crate) scalars: Region,
    pub(crate) learning_rate: Region,
    pub(crate) partials: Region,
    pub(crate) eval_losses: Region,
    rank: Rank,
}

impl<'a> Builder<'a> {
    fn new(spec: &'a ModelSpec, options: &'a PlanOptions, pipeline: &'a Pipeline, rank: Rank) -> Self {
        let nowhere = Region { buffer: BufferId(0), start: 0, len: 0 };
        let stage = rank.0 / options.mesh.dp;
        let mut builder = Self {
            spec,
            options,
            replica: (rank.0 % options.mesh.dp) as usize,
            dp: options.mesh.dp,
            stage,
            units: pipeline.placement.units_of(stage),
            pipeline,
            buffers: Vec::new(),
            instrs: Vec::new(),
            weights: vec![nowhere; spec.units.len()],
            scalars: nowhere,
            learning_rate: nowhere,
            partials: nowhere,
            eval_losses: nowhere,
            rank,
        };
        let own = builder.units.clone().into_iter();
        for UnitId(index) in own.chain(builder.borrowed_elsewhere()) {
            let (layout, index) = (builder.layout(UnitId(index)), index as usize);
            let (what, elements) =
                if builder.shards_params() { ("weight shard", layout.shard) } else { ("weights", layout.padded) };
            let name = format!("{}/{what}", spec.units[index].name);
            let region = builder.persistent(name, Kind::Weights, Place::Device, elements, options.dtype);
            builder.weights[index] = region;
        }
        let (ranks, row) = (builder.rows(), builder.row());
        builder.scalars = builder.persistent("scalars".into(), Kind::Scalars, Place::Device, SCALARS, DType::F32);
        builder.learning_rate = builder.persistent("learning rate".into(), Kind::Scalars, Place::Device, 1, DType::F32);
        builder.partials =
            builder.persistent("norms and losses".into(), Kind::Scalars, Place::Device, ranks * row, DType::F64);
        builder.eval_losses =
            builder.persistent("evaluation losses".into(), Kind::Scalars, Place::Device, ranks, DType::F64);
        builder
    }

    fn build(mut self) -> RankPlan {
        let train = steps::train(self.spec, self.options, self.pipeline, self.stage);
        let Lowered { program, homes, replicas } = lower::train(&mut self, &train);
        let evaluate = steps::evaluate(self.pipeline, self.stage);
        let evaluate: Program = lower::evaluate(&mut self, &evaluate);
        let row = self.row();
        let chunks = self.pipeline.placement.of_stage(self.stage).map(|chunk| chunk.units.clone()).collect();
        RankPlan {
            rank: self.rank,
            buffers: self.buffers,
            device_bytes: gpurun_types::Bytes(0),
            host_bytes: gpurun_types::Bytes(0),
            train: program,
            evaluate,
            chunks,
            homes,
            replicas,
            scalars: self.scalars,
            partials: self.partials,
            row,
            eval_losses: self.eval_losses,
        }
    }

    /// Elements of one row of partials: units' sums of squares, then losses of micro-batches.
    pub(crate) fn row(&self) -> usize {
        self.spec.units.len() + self.options.micro_batches as usize
    }

    /// Rows of partials: one for each rank.
    fn rows(&self) -> usize {
        (self.options.mesh.dp * self.options.mesh.pp) as usize
    }

    /// This rank's row of partials.
    pub(crate) fn row_index(&self) -> usize {
        self.rank.index()
    }

    /// The rank of another stage that has this one's place among the replicas.
    pub(crate) fn peer(&self, stage: u32) -> Rank {
        Rank(stage * self.dp + self.replica as u32)
    }

    /// The stage that owns a unit.
    pub(crate) fn stage_of(&self, unit: UnitId) -> u32 {
        self.pipeline.placement.stage_of(unit)
    }

    /// Units of other stages whose parameters this stage also uses.
    pub(crate) fn borrowed_elsewhere(&self) -> Vec<UnitId> {
        borrowed_elsewhere(self.spec, &self.units)
    }

    /// Units of this stage whose parameters another stage also uses, and which.
    pub(crate) fn lent(&self) -> Vec<(UnitId, u32)> {
        let mut lent = Vec::new();
        for stage in 0..self.pipeline.placement.stages {
            let foreign = borrowed_elsewhere(self.spec, &self.pipeline.placement.units_of(stage)).into_iter();
            lent.extend(foreign.filter(|u| self.units.contains(u)).map(|u| (u, stage)));
        }
        lent
    }

    /// The device weights that this rank's optimizer renews: its shard, or all.
    pub(crate) fn own_weight(&self, unit: UnitId) -> Region {
        let whole = self.weights[unit.0 as usize];
        if self.shards_optim() && !self.shards_params() { self.own_shard(whole, self.layout(unit)) } else { whole }
    }

    pub(crate) fn layout(&self, unit: UnitId) -> FlatLayout {
        self.spec.units[unit.0 as usize].layout(self.dp)
    }

    /// One rank needs no shards: its shard is the whole.
    pub(crate) fn shards_params(&self) -> bool {
        sharded(self.options)[0]
    }

    pub(crate) fn shards_grads(&self) -> bool {
        sharded(self.options)[1]
    }

    pub(crate) fn shards_optim(&self) -> bool {
        sharded(self.options)[2]
    }

    /// This rank's shard within a whole flat buffer.
    pub(crate) fn own_shard(&self, whole: Region, layout: FlatLayout) -> Region {
        Region { start: whole.start + self.replica * layout.shard, len: layout.shard, ..whole }
    }

    pub(crate) fn persistent(
        &mut self,
        name: String,
        kind: Kind,
        place: Place,
        elements: usize,
        dtype: DType,
    ) -> Region {
        self.buffer(name, kind, place, elements, dtype, true)
    }

    pub(crate) fn transient(
        &mut self,
        name: String,
        kind: Kind,
        place: Place,
        elements: usize,
        dtype: DType,
    ) -> Region {
        self.buffer(name, kind, place, elements, dtype, false)
    }

    fn buffer(
        &mut self,
        name: String,
        kind: Kind,
        place: Place,
        elements: usize,
        dtype: DType,
        persistent: bool,
    ) -> Region {
        let buffer = BufferId(self.buffers.len() as u32);
        self.buffers.push(Buffer { name, kind, place, elements, dtype, persistent, offset: 0 });
        Region { buffer, start: 0, len: elements }
    }

    pub(crate) fn emit(&mut self, lane: Lane, op: Op) {
        self.instrs.push(Instr { op, lane, waits: Vec::new() });
    }

    pub(crate) fn take_program(&mut self) -> Program {
        Program { instrs: std::mem::take(&mut self.instrs) }
    }

    /// The all-gather of the step's scalars; nothing with one rank.
    pub(crate) fn gather_scalars(&mut self, whole: Region, row: usize) {
        if self.rows() > 1 {
            let src = Region { start: whole.start + self.row_index() * row, len: row, ..whole };
            let group = if self.options.mesh.pp > 1 { Group::World } else { Group::Data };
            self.emit(Lane::Reduce, Op::AllGather { unit: None, group, src, dst: whole });
        }
    }

    pub(crate) fn home(&self, unit: UnitId, weight: Region, master: Region, m: Region, v: Region) -> UnitHome {
        let layout = self.layout(unit);
        let shard_start = self.replica * layout.shard;
        let weight_first = if self.shards_params() { shard_start } else { 0 };
        let master_first = if self.shards_optim() { shard_start } else { 0 };
        UnitHome { unit, layout, weight: (weight, weight_first), master: (master, master_first), m, v }
    }
}

/// Units outside `units` whose parameters these also use, ascending.
fn borrowed_elsewhere(spec: &ModelSpec, units: &[UnitId]) -> Vec<UnitId> {
    let borrows = units.iter().flat_map(|u| spec.units[u.0 as usize].borrows.iter().copied());
    let mut foreign: Vec<UnitId> = borrows.filter(|u| !units.contains(u)).collect();
    foreign.sort_unstable();
    foreign.dedup();
    foreign
}
