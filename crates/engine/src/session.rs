//! One rank's model in memory: built from a plan, initialised or restored, stepped, read out.

use std::sync::Arc;

use gpurun_comm::CommError;
use gpurun_device::{Backend, DeviceError, ScalarSlot};
use gpurun_model::{BatchShape, Model, init};
use gpurun_plan::{MemoryItem, Op, Plan, PlanOptions, Program, Region, Span, UnitId, memory_report};
use gpurun_types::{Bytes, DType, Place, Rank, View};
use half::{bf16, f16};

use crate::describe::model_spec;
use crate::error::EngineError;
use crate::interpreter::{AdamOptions, Interpreter, LogitsRequest, Machine, StepInputs, Watcher};
use crate::network::{Links, Network};

/// Elements moved between host and device at a time outside steps: bounds host memory.
const CHUNK: usize = 1 << 20;

/// What a session is built from.
pub struct SessionOptions {
    /// Arrangement, policy, dtype, recompute.
    pub plan: PlanOptions,
    /// Micro-batch of one rank.
    pub shape: BatchShape,
    /// Optimizer.
    pub adam: AdamOptions,
    /// Initial loss scale (1 without scaling).
    pub loss_scale: f32,
    /// Most device memory that may be used.
    pub device_limit: Option<Bytes>,
}

/// What a step did, read from the device after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Sum of the losses of all micro-batches of all ranks.
    pub loss_sum: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Loss scale that the step used.
    pub loss_scale: f32,
    /// True when gradients were not finite and Adam left everything as it was.
    pub skipped: bool,
    /// Steps skipped in a row, this one included.
    pub skipped_in_a_row: u32,
    /// Steps skipped since the start of training.
    pub skipped_in_all: u32,
}

/// Which state a stretch of a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// fp32 master weight.
    Master,
    /// First moment.
    M,
    /// Second moment.
    V,
}

impl State {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Master, Self::M, Self::V];
}

/// A stretch of one parameter that this rank holds.
#[derive(Clone, Debug)]
pub struct Stretch {
    /// Full parameter name.
    pub name: String,
    /// Which state.
    pub state: State,
    /// First element within the parameter.
    pub start: usize,
    /// Where it is on this rank.
    pub region: Region,
}

/// One rank's model in memory.
pub struct Session {
    machine: Arc<Machine>,
    interpreter: Interpreter,
    rank: Rank,
    options: SessionOptions,
}

impl Session {
    /// Plans, verifies, allocates exactly the plan, and connects. State is zero until `initialise` or `restore`.
    pub fn new(
        backend: Arc<dyn Backend>,
        model: Arc<Model>,
        network: &dyn Network,
        rank: Rank,
        options: SessionOptions,
    ) -> Result<Self, EngineError> {
        let spec = model_spec(&model, options.shape, options.plan.dtype, backend.as_ref())?;
        let mut plan = Plan::build(&spec, &options.plan)?;
        let plan = plan.ranks.swap_remove(rank.index());
        if let Some(limit) = options.device_limit
            && plan.device_bytes > limit
        {
            return Err(EngineError::OverLimit { what: "device memory", needed: plan.device_bytes, limit });
        }
        let links = Links::open(network, options.plan.mesh, &plan)
            .map_err(|source| EngineError::Control { what: "connecting the ranks", source })?;
        let (shape, dtype, adam) = (options.shape, options.plan.dtype, options.adam);
        let machine = Arc::new(Machine::new(backend, model, spec, plan, links, shape, dtype, adam)?);
        let interpreter = Interpreter::new(machine.clone(), rank);
        let session = Self { machine, interpreter, rank, options };
        let mut scalars = [0.0; ScalarSlot::COUNT];
        scalars[ScalarSlot::LossScale as usize] = session.options.loss_scale;
        session.set_scalars(&scalars)?;
        Ok(session)
    }

    /// Bytes of all arenas that this rank's backend holds now, on the device and on the host.
    pub fn allocated_bytes(&self) -> (Bytes, Bytes) {
        let [device, host] = [Place::Device, Place::Host].map(|place| self.machine.backend.allocated(place));
        (device, host)
    }

    /// This rank's memory, by name: sums to the arenas.
    pub fn memory(&self) -> Vec<MemoryItem> {
        memory_report(&self.machine.plan)
    }

    /// The rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.machine.model
    }

    /// Ranks in all.
    pub fn world(&self) -> u32 {
        self.options.plan.mesh.dp * self.options.plan.mesh.pp
    }

    /// This rank's place among the data-parallel replicas, and their number.
    pub fn replica(&self) -> (usize, usize) {
        let dp = self.options.plan.mesh.dp;
        ((self.rank.0 % dp) as usize, dp as usize)
    }

    /// Stages of the pipeline.
    pub fn stages(&self) -> u32 {
        self.options.plan.mesh.pp
    }

    /// Sizes of the device and the host arena: exactly what is allocated.
    pub fn planned_bytes(&self) -> (Bytes, Bytes) {
        (self.machine.plan.device_bytes, self.machine.plan.host_bytes)
    }

    /// Model FLOPs of a training step for one token: forward and twice as much for the backward.
    pub fn step_flops_per_token(&self) -> f64 {
        let seq = self.options.shape.seq;
        3.0 * self.machine.model.units.iter().map(|u| u.forward_flops_per_token(seq)).sum::<f64>()
    }

    /// Element type of a region.
    pub fn dtype_of(&self, region: Region) -> DType {
        self.machine.view(region).dtype
    }

    /// The micro-batch of one rank.
    pub fn shape(&self) -> BatchShape {
        self.options.shape
    }

    /// Words for the instructions of a training step and of an evaluation.
    pub fn labels(&self) -> (&[String], &[String]) {
        (self.interpreter.train.labels(), self.interpreter.evaluate.labels())
    }

    /// The instructions of a training step.
    pub fn train_program(&self) -> &Program {
        &self.machine.plan.train
    }

    /// Makes every wait of every rank fail.
    pub fn abort(&self, reason: &str) {
        self.machine.links.abort(reason);
    }

    /// Fills weights with their initial values: a pure function of the seed, whatever the layout.
    pub fn initialise(&self, seed: u64) -> Result<(), EngineError> {
        let model = self.machine.model.clone();
        self.fill_weights(|unit, position, start, out| {
            let param = &model.units[unit].params()[position];
            init::fill(seed, &param.name, param.init, start, out);
            Ok(())
        })
    }

    /// Fills master weights and weights from `read(unit, param, start, out)`.
    fn fill_weights(
        &self,
        mut read: impl FnMut(usize, usize, usize, &mut [f32]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let plan = &self.machine.plan;
        let homes = plan.homes.iter().map(|home| {
            let (weight, master) = (home.weight, home.master);
            // With fp32 weights both name the same memory, perhaps of different extent; the wider one is filled.
            let targets = if weight.0.buffer == master.0.buffer { vec![weight] } else { vec![weight, master] };
            (home.unit, targets)
        });
        let replicas = plan.replicas.iter().map(|replica| (replica.unit, vec![replica.weight]));
        for (unit, targets) in homes.chain(replicas) {
            for (region, first) in targets {
                self.fill(unit, region, first, |position, start, out| read(unit.0 as usize, position, start, out))?;
            }
        }
        Ok(())
    }

    /// Fills a region of a unit's flat buffer, which covers its elements from `first` on, from `read(param, start, out)`.
    fn fill(
        &self,
        unit: UnitId,
        region: Region,
        first: usize,
        mut read: impl FnMut(usize, usize, &mut [f32]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut buffer = vec![0.0; CHUNK.min(region.len)];
        self.each_piece(unit, region, first, |position, start, piece| {
            for done in (0..piece.len).step_by(CHUNK) {
                let len = CHUNK.min(piece.len - done);
                read(position, start + done, &mut buffer[..len])?;
                self.write_f32(&buffer[..len], Region { start: piece.start + done, len, ..piece })?;
            }
            Ok(())
        })
    }

    /// Calls `body(param, first element within it, region)` for each parameter that `region` overlaps.
    fn each_piece(
        &self,
        unit: UnitId,
        region: Region,
        first: usize,
        mut body: impl FnMut(usize, usize, Region) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let end = first + region.len;
        for (position, &(start, len, _)) in self.machine.own_params(unit).iter().enumerate() {
            let (from, to) = (start.max(first), (start + len).min(end));
            if from < to {
                let piece = Region { start: region.start + from - first, len: to - from, ..region };
                body(position, from - start, piece)?;
            }
        }
        Ok(())
    }

    /// The stretches of optimizer state that this rank writes to a checkpoint: its shard of every unit of its stage.
    pub fn owned_stretches(&self) -> Vec<Stretch> {
        let replica = self.rank.0 % self.options.plan.mesh.dp;
        let mut all = Vec::new();
        for home in &self.machine.plan.homes {
            let layout = self.machine.spec.units[home.unit.0 as usize].layout(self.options.plan.mesh.dp);
            let shard = replica as usize * layout.shard..(replica as usize + 1) * layout.shard;
            let (master, first) = home.master;
            let (from, to) = (shard.start.max(first), shard.end.min(first + master.len));
            for (state, region) in State::ALL.into_iter().zip([master, home.m, home.v]) {
                let mine = Region { start: region.start + from - first, len: to - from, ..region };
                let pieces = self.each_piece(home.unit, mine, from, |position, start, region| {
                    let name = self.machine.spec.units[home.unit.0 as usize].params[position].name.clone();
                    all.push(Stretch { name, state, start, region });
                    Ok(())
                });
                pieces.expect("listing pieces reads nothing");
            }
        }
        all
    }

    /// All stretches of optimizer state and weights on this rank, filled by `read(name, state, start, out)`.
    pub fn restore(
        &self,
        mut read: impl FnMut(&str, State, usize, &mut [f32]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let spec = &self.machine.spec;
        self.fill_weights(|unit, position, start, out| {
            read(&spec.units[unit].params[position].name, State::Master, start, out)
        })?;
        for home in &self.machine.plan.homes {
            let params = &spec.units[home.unit.0 as usize].params;
            for (state, region) in [(State::M, home.m), (State::V, home.v)] {
                self.fill(home.unit, region, home.master.1, |position, start, out| {
                    read(&params[position].name, state, start, out)
                })?;
            }
        }
        Ok(())
    }

    /// Reads elements of any floating type as fp32.
    pub fn read_f32(&self, region: Region, out: &mut [f32]) -> Result<(), EngineError> {
        let view = self.machine.view(region);
        let mut bytes = vec![0; view.bytes() as usize];
        self.machine.backend.download(view, &mut bytes).map_err(set_up("reading state"))?;
        decode(&bytes, view.dtype, out);
        Ok(())
    }

    fn write_f32(&self, values: &[f32], region: Region) -> Result<(), EngineError> {
        let view: View = self.machine.view(region);
        self.machine.backend.upload(&encode(values, view.dtype), view).map_err(set_up("writing state"))
    }

    /// The scalar state (loss scale, Adam's step count, skipped steps).
    pub fn scalars(&self) -> Result<[f32; ScalarSlot::COUNT], EngineError> {
        let mut out = [0.0; ScalarSlot::COUNT];
        self.read_f32(self.machine.plan.scalars, &mut out)?;
        Ok(out)
    }

    /// Sets the scalar state.
    pub fn set_scalars(&self, values: &[f32; ScalarSlot::COUNT]) -> Result<(), EngineError> {
        self.write_f32(values, self.machine.plan.scalars)
    }

    /// Runs one training step.
    pub fn step(&self, step: u64, inputs: StepInputs, watcher: &dyn Watcher) -> Result<StepOutcome, EngineError> {
        self.set_inputs(&inputs)?;
        self.interpreter.train_step(step, watcher)?;
        self.outcome()
    }

    /// Runs one training step and tells when each of its instructions ran, in seconds since `together` returned, which is called
    /// when the step could begin. Looking takes time too: such a step is no measure of speed.
    pub fn profiled_step(
        &self,
        step: u64,
        inputs: StepInputs,
        watcher: &dyn Watcher,
        together: &dyn Fn() -> Result<(), EngineError>,
    ) -> Result<(StepOutcome, Vec<Span>), EngineError> {
        self.set_inputs(&inputs)?;
        together()?;
        let program = self.train_program();
        self.machine.profile.begin(&self.machine.backend, program.instrs.len());
        let run = self.interpreter.train_step(step, watcher);
        let spans = self.machine.profile.end(program);
        run?;
        Ok((self.outcome()?, spans))
    }

    /// What the last step did.
    fn outcome(&self) -> Result<StepOutcome, EngineError> {
        let scalars = self.scalars()?;
        let slot = |s: ScalarSlot| scalars[s as usize];
        Ok(StepOutcome {
            loss_sum: self.loss_sum()?,
            grad_norm: slot(ScalarSlot::GradNorm),
            loss_scale: slot(ScalarSlot::UsedLossScale),
            skipped: slot(ScalarSlot::Skip) != 0.0,
            skipped_in_a_row: slot(ScalarSlot::SkippedInARow) as u32,
            skipped_in_all: slot(ScalarSlot::SkippedSteps) as u32,
        })
    }

    /// Runs the forward over one micro-batch; the summed loss of all replicas.
    pub fn evaluate(&self, step: u64, inputs: StepInputs, watcher: &dyn Watcher) -> Result<f64, EngineError> {
        self.set_inputs(&inputs)?;
        self.interpreter.evaluate(None, step, watcher)?;
        Ok(self.read_f64(self.machine.plan.eval_losses)?.iter().sum())
    }

    /// Logits of token row `row` after a forward over one micro-batch; `None` on ranks that do not hold the loss unit. Every
    /// rank must call it with the same inputs.
    pub fn logits(
        &self,
        row: usize,
        step: u64,
        inputs: StepInputs,
        watcher: &dyn Watcher,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        self.set_inputs(&inputs)?;
        self.interpreter.evaluate(Some(LogitsRequest { row }), step, watcher)?;
        let plan = &self.machine.plan;
        let head = UnitId(self.machine.spec.units.len() as u32 - 1);
        let io = plan.evaluate.instrs.iter().rev().find_map(|i| match &i.op {
            Op::Forward { io, unit, .. } if *unit == head => Some(io),
            _ => None,
        });
        let Some(io) = io else { return Ok(None) };
        let view = self.machine.logits_view(io).map_err(set_up("sampling"))?;
        let mut bytes = vec![0; view.bytes() as usize];
        self.machine.backend.download(view, &mut bytes).map_err(set_up("sampling"))?;
        let mut out = vec![0.0; view.len];
        decode(&bytes, view.dtype, &mut out);
        Ok(Some(out))
    }

    fn set_inputs(&self, inputs: &StepInputs) -> Result<(), EngineError> {
        self.machine.set_inputs(inputs).map_err(set_up("handing over a batch"))
    }

    /// Losses of the last step: after the units' columns of every row of the gathered partials.
    fn loss_sum(&self) -> Result<f64, EngineError> {
        let plan = &self.machine.plan;
        let units = self.machine.spec.units.len();
        let partials = self.read_f64(plan.partials)?;
        Ok(partials.chunks(plan.row).map(|row| row[units..].iter().sum::<f64>()).sum())
    }

    fn read_f64(&self, region: Region) -> Result<Vec<f64>, EngineError> {
        let view = self.machine.view(region);
        let mut bytes = vec![0; view.bytes() as usize];
        self.machine.backend.download(view, &mut bytes).map_err(set_up("reading losses"))?;
        Ok(bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("eight bytes"))).collect())
    }
}

fn set_up(what: &'static str) -> impl Fn(DeviceError) -> EngineError {
    move |source| EngineError::SetUp { what, source }
}

/// Wraps a failure of the control path.
pub(crate) fn control(what: &'static str) -> impl Fn(CommError) -> EngineError {
    move |source| EngineError::Control { what, source }
}

pub(crate) fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::I32 | DType::F64 => panic!("state is never {dtype}"),
    }
}

pub(crate) fn decode(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    let pair = |b: &[u8]| [b[0], b[1]];
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes(b.try_into().expect("four bytes"));
            }
        }
        DType::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = bf16::from_le_bytes(pair(b)).to_f32();
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f16::from_le_bytes(pair(b)).to_f32();
            }
        }
        DType::I32 | DType::F64 => panic!("state is never {dtype}"),
    }
}
