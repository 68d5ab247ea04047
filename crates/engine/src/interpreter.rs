//! Runs programs: one thread hands instructions to lanes, waits order them, a kernel sees only what its instruction
//! declared.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use gpurun_device::{
    AdamRun, AdamW, Backend, DeviceError, LossScaling, Mark, NormRun, RoundingKey, ScalarSlot, StepScalars,
};
use gpurun_model::{BatchShape, Cx, Mode, Model};
use gpurun_plan::{
    AdamPart, InstrId, Micro, ModelSpec, NormPart, Op, PassIo, Program, RankPlan, Region, UnitId, param_starts,
};
use gpurun_types::{ArenaId, DType, Lane, Place, Rank, View};

use crate::describe::Owners;
use crate::error::{At, EngineError};
use crate::network::{Links, message_index};

/// Hyper-parameters of the optimizer that do not change within a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamOptions {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled decay of matrices and tables.
    pub weight_decay: f32,
    /// Largest global gradient norm; infinite for none.
    pub clip: f32,
    /// Dynamic loss scaling.
    pub scaling: Option<LossScaling>,
    /// Seed of the random bits that round moments to bf16.
    pub seed: u64,
}

/// Tokens of one micro-batch: three i32 vectors of `batch * seq` elements.
#[derive(Clone, Debug, Default)]
pub struct HostBatch {
    /// Token ids.
    pub tokens: Vec<i32>,
    /// Next tokens; negative where there is no loss.
    pub targets: Vec<i32>,
    /// Index, within its sequence, of the first token of each token's document.
    pub starts: Vec<i32>,
}

/// What the host hands to a step.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// The micro-batches of this rank.
    pub micros: Vec<HostBatch>,
    /// Learning rate.
    pub learning_rate: f32,
    /// One over the loss-bearing tokens of the global batch.
    pub loss_factor: f32,
}

/// Told where the interpreter is. Calls are frequent and must be cheap.
pub trait Watcher: Send + Sync {
    /// The compute lane begins instruction `instr`.
    fn at(&self, instr: u32);
    /// The compute lane waits for instruction `instr` of another lane.
    fn waiting_for(&self, instr: u32);
    /// A lane finished an instruction.
    fn progressed(&self);
}

/// Row whose logits a sampling pass wants, and where they go.
#[derive(Clone, Copy, Debug)]
pub struct LogitsRequest {
    /// Token row in the micro-batch.
    pub row: usize,
}

/// Everything that instructions of one rank refer to.
pub struct Machine {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) model: Arc<Model>,
    pub(crate) spec: ModelSpec,
    pub(crate) plan: RankPlan,
    pub(crate) links: Links,
    pub(crate) shape: BatchShape,
    pub(crate) dtype: DType,
    pub(crate) adam: AdamOptions,
    loss_factor: AtomicU32,
    staging: Staging,
    arenas: [Option<ArenaId>; 2],
    params: Vec<UnitParams>,
}

/// Where a unit's parameters lie in flat buffers.
struct UnitParams {
    /// Start and length of each own parameter, and whether it decays.
    own: Vec<(usize, usize, bool)>,
    /// For each borrowed parameter: which borrowed unit (its place in `UnitSpec::borrows`), start, length.
    borrowed: Vec<(usize, usize, usize)>,
}

impl Machine {
    /// Allocates exactly the plan's arenas.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        backend: Arc<dyn Backend>,
        model: Arc<Model>,
        spec: ModelSpec,
        plan: RankPlan,
        links: Links,
        shape: BatchShape,
        dtype: DType,
        adam: AdamOptions,
    ) -> Result<Self, EngineError> {
        let mut arenas = [None, None];
        for (slot, place, bytes) in [(0, Place::Device, plan.device_bytes), (1, Place::Host, plan.host_bytes)] {
            if bytes.0 > 0 {
                arenas[slot] = Some(backend.allocate(place, bytes).map_err(EngineError::DoesNotFit)?);
            }
        }
        let params = unit_params(&model, &spec);
        let loads = plan.train.instrs.iter().filter(|i| matches!(i.op, Op::LoadBatch { .. })).count();
        let staging = Staging::new(backend.as_ref(), loads.max(1), shape.tokens())?;
        let loss_factor = AtomicU32::new(0);
        Ok(Self { backend, model, spec, plan, links, shape, dtype, adam, loss_factor, staging, arenas, params })
    }

    /// The memory of a region.
    ///
    /// # Panics
    /// When the region leaves its buffer: a bug of the plan.
    pub fn view(&self, region: Region) -> View {
        let buffer = &self.plan.buffers[region.buffer.0 as usize];
        assert!(region.start + region.len <= buffer.elements, "{region:?} leaves buffer {}", buffer.name);
        let arena = self.arenas[usize::from(buffer.place == Place::Host)].expect("a buffer's arena is allocated");
        View {
            arena,
            offset: buffer.offset + (region.start * buffer.dtype.size()) as u64,
            len: region.len,
            dtype: buffer.dtype,
        }
    }

    /// Start and length of a unit's own parameters in its flat buffer, and whether each decays.
    pub fn own_params(&self, unit: UnitId) -> &[(usize, usize, bool)] {
        &self.params[unit.0 as usize].own
    }

    fn views(&self, regions: &[Region]) -> Vec<View> {
        regions.iter().map(|r| self.view(*r)).collect()
    }

    /// Parameter views of a unit from its own and borrowed flat buffers.
    fn param_views(&self, unit: UnitId, flat: &[Region]) -> Vec<View> {
        let Some((own, borrowed)) = flat.split_first() else { return Vec::new() };
        let params = &self.params[unit.0 as usize];
        let own = self.view(*own);
        let mut views: Vec<View> = params.own.iter().map(|&(start, len, _)| own.slice(start, len)).collect();
        for &(which, start, len) in &params.borrowed {
            views.push(self.view(borrowed[which]).slice(start, len));
        }
        views
    }

    fn pass(
        &self,
        lane: Lane,
        unit: UnitId,
        io: &PassIo,
        mode: Mode,
        body: impl FnOnce(&Cx<'_>, Pass) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let scratch = self.views(&io.scratch);
        let tokens = self.view(io.batch[0]);
        // Units other than the loss unit do not touch these two; they get an empty view.
        let nothing = tokens.slice(0, 0);
        let cx = Cx {
            backend: self.backend.as_ref(),
            lane,
            shape: self.shape,
            dtype: self.dtype,
            mode,
            tokens,
            targets: self.view(io.batch[1]),
            starts: self.view(io.batch[2]),
            scratch: &scratch,
            loss: io.loss.map_or(View { dtype: DType::F64, ..nothing }, |r| self.view(r)),
            loss_scale: io.scalars.map_or(View { dtype: DType::F32, ..nothing }, |r| {
                self.view(r).slice(ScalarSlot::LossScale as usize, 1)
            }),
            loss_factor: f32::from_bits(self.loss_factor.load(Ordering::Relaxed)),
        };
        let pass = Pass {
            weights: self.param_views(unit, &io.weights),
            grads: self.param_views(unit, &io.grads),
            x: io.x.map(|r| self.view(r)),
            y: io.y.map(|r| self.view(r)),
            dy: io.dy.map(|r| self.view(r)),
            dx: io.dx.map(|r| self.view(r)),
            saved: self.views(&io.saved),
        };
        body(&cx, pass)
    }

    /// Puts the inputs of the next run where its copies find them. Nothing of an earlier run may be under way.
    pub fn set_inputs(&self, inputs: &StepInputs) -> Result<(), DeviceError> {
        self.loss_factor.store(inputs.loss_factor.to_bits(), Ordering::Relaxed);
        // Sequences without a document's start inside may take faster kernels.
        self.backend.whole_documents(inputs.micros.iter().all(|m| m.starts.iter().all(|s| *s == 0)));
        self.backend.upload(&inputs.learning_rate.to_le_bytes(), self.staging.learning_rate)?;
        for (micro, host) in inputs.micros.iter().enumerate() {
            for (which, values) in [&host.tokens, &host.targets, &host.starts].into_iter().enumerate() {
                self.backend.upload(&i32_bytes(values), self.staging.batch(Micro(micro as u32), which))?;
            }
        }
        Ok(())
    }

    /// Runs one instruction on the calling thread (or enqueues it on its lane's stream).
    fn execute(&self, op: &Op, lane: Lane, mode: Mode, logits: Option<LogitsRequest>) -> Result<(), Fault> {
        match op {
            Op::LoadBatch { micro, batch, learning_rate } => {
                for (which, region) in batch.iter().enumerate() {
                    self.backend.copy(lane, self.staging.batch(*micro, which), self.view(*region))?;
                }
                if let Some(region) = learning_rate {
                    self.backend.copy(lane, self.staging.learning_rate, self.view(*region))?;
                }
            }
            Op::Zero { dst } => self.backend.fill(lane, self.view(*dst), 0.0)?,
            Op::Forward { unit, io, .. } => self.pass(lane, *unit, io, mode, |cx, p| {
                let unit = &self.model.units[unit.0 as usize];
                match (logits, p.x) {
                    (Some(want), Some(x)) if unit.output_width() == 0 => {
                        unit.logits(cx, &p.weights, x, want.row, self.logits_view(io)?, &p.saved)
                    }
                    _ => unit.forward(cx, &p.weights, p.x, p.y, &p.saved),
                }
            })?,
            Op::Restore { unit, io, .. } => self.pass(lane, *unit, io, mode, |cx, p| {
                self.model.units[unit.0 as usize].restore(cx, &p.weights, p.x, &p.saved)
            })?,
            Op::Backward { unit, io, .. } => self.pass(lane, *unit, io, mode, |cx, p| {
                let unit = &self.model.units[unit.0 as usize];
                unit.backward(cx, &p.weights, &p.grads, p.x, p.dy, p.dx, &p.saved)
            })?,
            Op::ReduceScatter { group, src, dst, accumulate, .. } => {
                self.links.group(*group, lane).reduce_scatter(self.view(*src), self.view(*dst), *accumulate)?;
            }
            Op::AllGather { group, src, dst, .. } => {
                self.links.group(*group, lane).all_gather(self.view(*src), self.view(*dst))?;
            }
            Op::Send { peer, src, .. } => {
                let rank = self.plan.rank;
                self.links.messages(rank, *peer).send(message_index(*peer, rank), self.view(*src))?;
            }
            Op::Recv { peer, dst, .. } => {
                let rank = self.plan.rank;
                self.links.messages(*peer, rank).recv(message_index(*peer, rank), self.view(*dst))?;
            }
            Op::Add { src, dst, .. } => self.backend.add_assign(lane, self.view(*src), self.view(*dst))?,
            Op::Norm { parts } => {
                let run = |part: &NormPart| NormRun { src: self.view(part.src), partial: self.view(part.dst) };
                self.backend.norm_partial(lane, &parts.iter().map(run).collect::<Vec<_>>())?;
            }
            Op::Scalars { partials, row, units, learning_rate, scalars } => {
                self.step_scalars(lane, *partials, *row, *units, *learning_rate, *scalars)?;
            }
            Op::Adam { parts, scalars, .. } => self.adam(lane, parts, *scalars)?,
            Op::Copy { src, dst, .. } => self.backend.copy(lane, self.view(*src), self.view(*dst))?,
        }
        Ok(())
    }

    fn step_scalars(
        &self,
        lane: Lane,
        partials: Region,
        row: usize,
        units: usize,
        learning_rate: Region,
        scalars: Region,
    ) -> Result<(), DeviceError> {
        self.backend.step_scalars(
            lane,
            StepScalars {
                partials: self.view(partials),
                shards: partials.len / row,
                row,
                units,
                scalars: self.view(scalars),
                learning_rate: self.view(learning_rate),
                clip: self.adam.clip,
                beta1: self.adam.beta1,
                beta2: self.adam.beta2,
                scaling: self.adam.scaling,
            },
        )
    }

    fn adam(&self, lane: Lane, parts: &[AdamPart], scalars: Region) -> Result<(), DeviceError> {
        let runs: Vec<AdamRun> = parts.iter().flat_map(|part| self.adam_runs(part)).collect();
        let AdamOptions { beta1, beta2, eps, .. } = self.adam;
        self.backend.adamw(lane, &AdamW { runs: &runs, scalars: self.view(scalars), beta1, beta2, eps })
    }

    /// The stretches of a unit's part that share one weight decay.
    fn adam_runs(&self, part: &AdamPart) -> Vec<AdamRun> {
        let AdamPart { unit, first, .. } = *part;
        let [grad, master, m, v] = [part.grad, part.master, part.m, part.v].map(|r| self.view(r));
        let weight = part.weight.map(|r| self.view(r));
        let run = |(start, end, decay): (usize, usize, bool)| {
            let cut = |view: View| view.slice(start - first, end - start);
            AdamRun {
                master: cut(master),
                m: cut(m),
                v: cut(v),
                grad: cut(grad),
                weight: weight.map(cut),
                weight_decay: if decay { self.adam.weight_decay } else { 0.0 },
                rounding: RoundingKey::new(self.adam.seed, unit.0, start as u64),
            }
        };
        decay_runs(self.own_params(unit), first, first + master.len).into_iter().map(run).collect()
    }

    /// Where a sampling pass finds its logits: the head of the loss unit's scratch tensor of that name.
    pub(crate) fn logits_view(&self, io: &PassIo) -> Result<View, DeviceError> {
        let spec = self.spec.units.last().expect("a model has units");
        let at = spec.scratch.iter().position(|t| t.name == "logits");
        let at = at.ok_or_else(|| DeviceError::Missing("the loss unit has no scratch tensor named logits".into()))?;
        Ok(self.view(io.scratch[at]).slice(0, self.model.vocabulary))
    }
}

/// Host memory from which a step's inputs are copied: tokens, targets and starts of each micro-batch, the learning rate.
struct Staging {
    batches: View,
    learning_rate: View,
    tokens: usize,
}

impl Staging {
    fn new(backend: &dyn Backend, micros: usize, tokens: usize) -> Result<Self, EngineError> {
        let batches = micros * 3 * tokens;
        let bytes = DType::I32.bytes(batches + 1);
        let arena = backend.allocate(Place::Host, bytes).map_err(EngineError::DoesNotFit)?;
        let view = View { arena, offset: 0, len: batches, dtype: DType::I32 };
        let learning_rate = View { offset: view.bytes(), len: 1, dtype: DType::F32, ..view };
        Ok(Self { batches: view, learning_rate, tokens })
    }

    fn batch(&self, micro: Micro, which: usize) -> View {
        self.batches.slice((micro.0 as usize * 3 + which) * self.tokens, self.tokens)
    }
}

/// Views that one pass of a unit gets.
struct Pass {
    weights: Vec<View>,
    grads: Vec<View>,
    x: Option<View>,
    y: Option<View>,
    dy: Option<View>,
    dx: Option<View>,
    saved: Vec<View>,
}

fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn unit_params(model: &Model, spec: &ModelSpec) -> Vec<UnitParams> {
    let owners = Owners::of(model);
    let starts: Vec<Vec<usize>> =
        spec.units.iter().map(|u| param_starts(u.params.iter().map(|p| p.elements)).0).collect();
    let own = |unit: usize, param: usize| (starts[unit][param], spec.units[unit].params[param].elements);
    model
        .units
        .iter()
        .enumerate()
        .map(|(index, unit)| UnitParams {
            own: spec.units[index]
                .params
                .iter()
                .enumerate()
                .map(|(position, p)| {
                    let (start, len) = own(index, position);
                    (start, len, p.decay)
                })
                .collect(),
            borrowed: unit
                .borrows()
                .iter()
                .map(|name| {
                    let (owner, position) = owners.find(name).expect("model_spec checked the borrows");
                    let which = spec.units[index].borrows.iter().position(|b| *b == owner);
                    let (start, len) = own(owner.0 as usize, position);
                    (which.expect("model_spec lists every owner"), start, len)
                })
                .collect(),
        })
        .collect()
}

/// Stretches of `first..end` of a flat buffer whose parameters share one decay, neighbours merged. Gaps between
/// parameters hold zeros and stay zero, so a stretch may run over them.
fn decay_runs(params: &[(usize, usize, bool)], first: usize, end: usize) -> Vec<(usize, usize, bool)> {
    let mut runs: Vec<(usize, usize, bool)> = Vec::new();
    for &(start, len, decay) in params {
        let (start, stop) = (start.max(first), (start + len).min(end));
        if start >= stop {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.2 == decay => last.1 = stop,
            _ => runs.push((start, stop, decay)),
        }
    }
    runs
}

enum Fault {
    Device(DeviceError),
    Comm(gpurun_comm::CommError),
}

impl From<DeviceError> for Fault {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl From<gpurun_comm::CommError> for Fault {
    fn from(error: gpurun_comm::CommError) -> Self {
        Self::Comm(error)
    }
}

/// One run of one program: what is done so far, shared by the lanes.
struct Run {
    program: Arc<Prepared>,
    mode: Mode,
    logits: Option<LogitsRequest>,
    state: Mutex<RunState>,
    changed: Condvar,
}

struct RunState {
    done: Vec<bool>,
    left: usize,
    failed: Option<(usize, Fault)>,
}

impl Run {
    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the instructions that `index` must follow; false when the run has failed.
    fn wait_for(&self, index: usize, watcher: Option<&dyn Watcher>) -> bool {
        let waits = &self.program.program.instrs[index].waits;
        let mut state = self.lock();
        for wait in waits {
            if let (Some(watcher), false) = (watcher, state.done[wait.0 as usize]) {
                watcher.waiting_for(wait.0);
            }
            while !state.done[wait.0 as usize] && state.failed.is_none() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.failed.is_none()
    }

    fn finish(&self, index: usize, result: Result<(), Fault>) {
        let mut state = self.lock();
        state.done[index] = true;
        state.left -= 1;
        if let Err(fault) = result {
            state.failed.get_or_insert((index, fault));
        }
        self.changed.notify_all();
    }
}

/// A program with what the interpreter needs beside it.
pub struct Prepared {
    program: Program,
    labels: Vec<String>,
    /// Which instructions another one waits for: only these need an event.
    awaited: Vec<bool>,
}

impl Prepared {
    fn new(program: Program, spec: &ModelSpec) -> Self {
        let labels = program.instrs.iter().map(|i| i.op.label(spec)).collect();
        let mut awaited = vec![false; program.instrs.len()];
        for InstrId(wait) in program.instrs.iter().flat_map(|i| &i.waits) {
            awaited[*wait as usize] = true;
        }
        Self { program, labels, awaited }
    }

    /// What each instruction does, in words.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }
}

/// Runs the programs of one rank.
pub struct Interpreter {
    machine: Arc<Machine>,
    lanes: Vec<(Lane, LaneThread)>,
    /// One training step.
    pub train: Arc<Prepared>,
    /// Forward and loss of one micro-batch.
    pub evaluate: Arc<Prepared>,
}

impl Interpreter {
    /// An interpreter of the machine's plan; on a synchronous backend each lane but compute gets a thread.
    pub fn new(machine: Arc<Machine>, rank: Rank) -> Self {
        let train = Arc::new(Prepared::new(machine.plan.train.clone(), &machine.spec));
        let evaluate = Arc::new(Prepared::new(machine.plan.evaluate.clone(), &machine.spec));
        let mut lanes = Vec::new();
        if !machine.backend.is_asynchronous() {
            for lane in Lane::ALL {
                let used = |p: &Prepared| p.program.instrs.iter().any(|i| i.lane == lane);
                if lane != Lane::Compute && (used(&train) || used(&evaluate)) {
                    lanes.push((lane, LaneThread::start(lane, rank, machine.clone())));
                }
            }
        }
        Self { machine, lanes, train, evaluate }
    }

    /// Runs one training step over the inputs set before.
    pub fn train_step(&self, step: u64, watcher: &dyn Watcher) -> Result<(), EngineError> {
        self.run(&self.train, Mode::Train, None, step, watcher)
    }

    /// Runs one evaluation micro-batch; with `logits`, the loss unit leaves logits in its scratch instead of a loss.
    pub fn evaluate(&self, logits: Option<LogitsRequest>, step: u64, watcher: &dyn Watcher) -> Result<(), EngineError> {
        self.run(&self.evaluate, Mode::Evaluate, logits, step, watcher)
    }

    fn run(
        &self,
        program: &Arc<Prepared>,
        mode: Mode,
        logits: Option<LogitsRequest>,
        step: u64,
        watcher: &dyn Watcher,
    ) -> Result<(), EngineError> {
        let outcome = if self.machine.backend.is_asynchronous() {
            self.run_streams(program, mode, logits, watcher)
        } else {
            self.run_threads(program, mode, logits, watcher)
        };
        outcome.map_err(|(instr, fault)| {
            let at = At { step, instr, label: program.labels[instr].clone() };
            let error = match fault {
                Fault::Device(source) => EngineError::Device { at, source },
                Fault::Comm(source) => EngineError::Comm { at, source },
            };
            self.machine.links.abort(&error.to_string());
            error
        })
    }

    fn run_threads(
        &self,
        program: &Arc<Prepared>,
        mode: Mode,
        logits: Option<LogitsRequest>,
        watcher: &dyn Watcher,
    ) -> Result<(), (usize, Fault)> {
        let count = program.program.instrs.len();
        let run = Arc::new(Run {
            program: program.clone(),
            mode,
            logits,
            state: Mutex::new(RunState { done: vec![false; count], left: count, failed: None }),
            changed: Condvar::new(),
        });
        // Other lanes get their whole list at once: each waits for what its instructions declare.
        for (lane, thread) in &self.lanes {
            let list = (0..count).filter(|i| program.program.instrs[*i].lane == *lane).collect();
            thread.push(run.clone(), list);
        }
        let _release = ReleaseOnPanic { run: &run, links: &self.machine.links };
        for (index, instr) in program.program.instrs.iter().enumerate() {
            if instr.lane != Lane::Compute {
                continue;
            }
            if !run.wait_for(index, Some(watcher)) {
                break;
            }
            watcher.at(index as u32);
            let result = self.machine.execute(&instr.op, instr.lane, mode, logits);
            let failed = result.is_err();
            run.finish(index, result);
            if failed {
                break;
            }
            watcher.progressed();
        }
        self.drain(&run, watcher)
    }

    /// Waits until every lane has left the run; after a failure, aborts the communicators so that none stays in a wait.
    fn drain(&self, run: &Run, watcher: &dyn Watcher) -> Result<(), (usize, Fault)> {
        let mut state = run.lock();
        while state.left > 0 && state.failed.is_none() {
            if let Some(first) = state.done.iter().position(|d| !d) {
                watcher.waiting_for(first as u32);
            }
            state = run.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            watcher.progressed();
        }
        let failed = state.failed.take();
        if let Some((index, fault)) = failed {
            // Lanes see `failed` through this second mark and skip the rest.
            state.failed = Some((index, Fault::Device(DeviceError::Missing("the step has failed".into()))));
            drop(state);
            let reason = match &fault {
                Fault::Device(e) => e.to_string(),
                Fault::Comm(e) => e.to_string(),
            };
            self.machine.links.abort(&format!("{}: {reason}", run.program.labels[index]));
            for (_, thread) in &self.lanes {
                thread.settle();
            }
            return Err((index, fault));
        }
        Ok(())
    }

    fn run_streams(
        &self,
        program: &Arc<Prepared>,
        mode: Mode,
        logits: Option<LogitsRequest>,
        watcher: &dyn Watcher,
    ) -> Result<(), (usize, Fault)> {
        let backend = &self.machine.backend;
        let mut marks: Vec<Option<Mark>> = vec![None; program.program.instrs.len()];
        for (index, instr) in program.program.instrs.iter().enumerate() {
            watcher.at(index as u32);
            let enqueue = || -> Result<Option<Mark>, Fault> {
                for wait in &instr.waits {
                    let mark = marks[wait.0 as usize].expect("an awaited instruction has a mark");
                    backend.wait(instr.lane, mark)?;
                }
                self.machine.execute(&instr.op, instr.lane, mode, logits)?;
                Ok(if program.awaited[index] { Some(backend.record(instr.lane)?) } else { None })
            };
            marks[index] = enqueue().map_err(|fault| (index, fault))?;
            watcher.progressed();
        }
        for lane in Lane::ALL {
            let last = program.program.instrs.iter().rposition(|i| i.lane == lane);
            if let Some(last) = last {
                backend.synchronize(lane).map_err(|e| (last, Fault::Device(e)))?;
            }
        }
        // What failed while it ran freed its lane, and what came after it worked on nothing.
        let last = program.program.instrs.iter().rposition(|i| matches!(i.lane, Lane::Gather | Lane::Reduce));
        self.machine.links.check().map_err(|e| (last.unwrap_or(0), Fault::Comm(e)))
    }
}

/// Frees lanes and peers that wait for this thread when a bug makes it panic, so that the panic can be reported.
struct ReleaseOnPanic<'a> {
    run: &'a Run,
    links: &'a Links,
}

impl Drop for ReleaseOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let fault = Fault::Device(DeviceError::Missing("the compute lane panicked".into()));
            self.run.lock().failed.get_or_insert((0, fault));
            self.run.changed.notify_all();
            self.links.abort("the compute lane panicked");
        }
    }
}

/// The thread of one lane on a synchronous backend.
struct LaneThread {
    queue: Arc<LaneQueue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct LaneQueue {
    state: Mutex<LaneState>,
    changed: Condvar,
}

#[derive(Default)]
struct LaneState {
    work: VecDeque<(Arc<Run>, Vec<usize>)>,
    busy: bool,
    closed: bool,
}

impl LaneQueue {
    fn lock(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LaneThread {
    fn start(lane: Lane, rank: Rank, machine: Arc<Machine>) -> Self {
        let queue = Arc::new(LaneQueue::default());
        let shared = queue.clone();
        let thread = std::thread::Builder::new()
            .name(format!("r{}-{lane}", rank.0))
            .spawn(move || {
                while let Some((run, list)) = take(&shared) {
                    run_list(&machine, &run, &list);
                    shared.lock().busy = false;
                    shared.changed.notify_all();
                }
            })
            .expect("a thread for a lane can be started");
        Self { queue, thread: Some(thread) }
    }

    fn push(&self, run: Arc<Run>, list: Vec<usize>) {
        self.queue.lock().work.push_back((run, list));
        self.queue.changed.notify_all();
    }

    /// Returns when the lane has nothing left to do.
    fn settle(&self) {
        let mut state = self.queue.lock();
        while state.busy || !state.work.is_empty() {
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn take(queue: &LaneQueue) -> Option<(Arc<Run>, Vec<usize>)> {
    let mut state = queue.lock();
    loop {
        if let Some(work) = state.work.pop_front() {
            state.busy = true;
            return Some(work);
        }
        if state.closed {
            return None;
        }
        state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn run_list(machine: &Machine, run: &Run, list: &[usize]) {
    for &index in list {
        if !run.wait_for(index, None) {
            return;
        }
        let instr = &run.program.program.instrs[index];
        // A panic here would leave the step waiting for ever; it is carried to the thread that drives the step.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            machine.execute(&instr.op, instr.lane, run.mode, run.logits)
        }));
        let result = result.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(Fault::Device(DeviceError::Failed { operation: "panic on a lane".into(), reason: text.to_owned() }))
        });
        run.finish(index, result);
    }
}

impl Drop for LaneThread {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A lane that panicked has reported it already.
            let _ = thread.join();
        }
    }
}
