//! Lanes as threads, for backends whose operations run on the calling thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use gpurun_device::DeviceError;
use gpurun_model::Mode;
use gpurun_types::{Lane, Rank};

use super::machine::Machine;
use super::{Fault, Interpreter, LogitsRequest, Prepared, Watcher};
use crate::error::EngineError;
use crate::network::Links;

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

impl Interpreter {
    pub(super) fn run_threads(
        &self,
        program: &Arc<Prepared>,
        mode: Mode,
        logits: Option<LogitsRequest>,
        step: u64,
        watcher: &dyn Watcher,
    ) -> Result<(), EngineError> {
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
            let result = self.machine.run_instr(index, instr, mode, logits);
            let failed = result.is_err();
            run.finish(index, result);
            if failed {
                break;
            }
            watcher.progressed();
        }
        self.drain(&run, step, watcher)
    }

    /// Waits until every lane has left the run; after a failure, aborts the communicators so that none stays in a wait.
    fn drain(&self, run: &Run, step: u64, watcher: &dyn Watcher) -> Result<(), EngineError> {
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
            let error = self.give_up(&run.program, step, index, fault);
            for (_, thread) in &self.lanes {
                thread.settle();
            }
            return Err(error);
        }
        Ok(())
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
pub(super) struct LaneThread {
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
    pub fn start(lane: Lane, rank: Rank, machine: Arc<Machine>) -> Self {
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
            machine.run_instr(index, instr, run.mode, run.logits)
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
