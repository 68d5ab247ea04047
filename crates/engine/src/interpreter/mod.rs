//! Runs programs: one thread hands instructions to lanes, waits order them, a kernel sees only what its instruction
//! declared.

mod dispatch;
mod inputs;
mod machine;
mod optimizer;
mod params;
mod profile;
mod streams;
mod threads;

use std::sync::Arc;

use gpurun_device::DeviceError;
use gpurun_model::Mode;
use gpurun_plan::{InstrId, ModelSpec, Program};
use gpurun_types::{Lane, Rank};

pub use inputs::{HostBatch, StepInputs};
pub use machine::Machine;
pub use optimizer::AdamOptions;

use crate::error::{At, EngineError};
use threads::LaneThread;

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

/// How an instruction failed.
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
    /// On a synchronous backend: the thread of each lane but compute.
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
        if self.machine.backend.is_asynchronous() {
            self.run_streams(program, mode, logits, step, watcher)
        } else {
            self.run_threads(program, mode, logits, step, watcher)
        }
    }

    /// The error of a failed instruction, after every wait of every rank has been told to fail.
    fn give_up(&self, program: &Prepared, step: u64, instr: usize, fault: Fault) -> EngineError {
        let at = At { step, instr, label: program.labels[instr].clone() };
        let error = match fault {
            Fault::Device(source) => EngineError::Device { at, source },
            Fault::Comm(source) => EngineError::Comm { at, source },
        };
        self.machine.links.abort(&error.to_string());
        error
    }
}
