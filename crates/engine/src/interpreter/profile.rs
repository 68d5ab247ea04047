//! When each instruction of a step ran, for a step that is run to be looked at. Other steps pay nothing for it.
//!
//! Lanes go on side by side as in any step. On a synchronous backend the clock is read around each instruction. On an
//! asynchronous one a mark is recorded behind each, and a thread asks without pause which have passed: an instruction
//! began when it was enqueued, what came before it on its lane had ended, and so had what it waits for.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use gpurun_device::{Backend, DeviceError, Mark};
use gpurun_model::Mode;
use gpurun_plan::{Instr, Program, Span};
use gpurun_types::Lane;

use super::machine::Machine;
use super::{Fault, LogitsRequest};

/// Off, or what has been seen of the step so far.
#[derive(Default)]
pub struct Profile(Mutex<Option<Arc<Recording>>>);

struct Recording {
    begin: Instant,
    /// Start (for enqueued work: when it was enqueued) and end of each instruction.
    spans: Mutex<Vec<Span>>,
    poller: Mutex<Option<Poller>>,
}

struct Poller {
    marks: Sender<Enqueued>,
    thread: JoinHandle<()>,
}

/// Work that has been enqueued and that has passed when its mark has.
struct Enqueued {
    index: usize,
    mark: Mark,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recording {
    fn now(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }
}

impl Profile {
    /// The instructions of the next step, `count` of them, are looked at; times count from now on.
    pub(crate) fn begin(&self, backend: &Arc<dyn Backend>, count: usize) {
        let spans = Mutex::new(vec![Span::default(); count]);
        let recording = Arc::new(Recording { begin: Instant::now(), spans, poller: Mutex::default() });
        if backend.is_asynchronous() {
            let (marks, incoming) = channel();
            let (seen, backend) = (recording.clone(), backend.clone());
            let thread = std::thread::Builder::new().name("profile".to_owned());
            let thread = thread.spawn(move || poll(&seen, backend.as_ref(), &incoming));
            *lock(&recording.poller) = Some(Poller { marks, thread: thread.expect("a thread can be started") });
        }
        *lock(&self.0) = Some(recording);
    }

    /// Looks no more; when each instruction of `program` ran.
    pub(crate) fn end(&self, program: &Program) -> Vec<Span> {
        let Some(recording) = lock(&self.0).take() else { return Vec::new() };
        if let Some(Poller { marks, thread }) = lock(&recording.poller).take() {
            drop(marks);
            // Without it some spans stay empty; it has nothing that could panic.
            let _ = thread.join();
        }
        let mut spans = std::mem::take(&mut *lock(&recording.spans));
        begin_after(program, &mut spans);
        spans
    }

    fn recording(&self) -> Option<Arc<Recording>> {
        lock(&self.0).clone()
    }
}

/// Sets each start behind what the instruction came after.
fn begin_after(program: &Program, spans: &mut [Span]) {
    let mut lanes = [0.0f64; Lane::ALL.len()];
    for (index, instr) in program.instrs.iter().enumerate().take(spans.len()) {
        let before =
            instr.waits.iter().map(|wait| spans[wait.0 as usize].end).fold(lanes[instr.lane.index()], f64::max);
        let span = &mut spans[index];
        span.start = span.start.max(before).min(span.end);
        lanes[instr.lane.index()] = span.end;
    }
}

impl Machine {
    /// Executes instruction `index` of its program, and notes when it ran while that is asked for.
    pub(super) fn run_instr(
        &self,
        index: usize,
        instr: &Instr,
        mode: Mode,
        logits: Option<LogitsRequest>,
    ) -> Result<(), Fault> {
        let recording = match mode {
            Mode::Train => self.profile.recording(),
            Mode::Evaluate => None,
        };
        let Some(recording) = recording else { return self.execute(&instr.op, instr.lane, mode, logits) };
        let start = recording.now();
        self.execute(&instr.op, instr.lane, mode, logits)?;
        lock(&recording.spans)[index] = Span { start, end: recording.now() };
        let poller = lock(&recording.poller);
        // Work on the host lane is done when the call returns.
        if let Some(poller) = poller.as_ref().filter(|_| instr.lane != Lane::Host) {
            let mark = self.backend.record(instr.lane)?;
            // The poller listens until it is told that no more will come.
            let _heard = poller.marks.send(Enqueued { index, mark });
        }
        Ok(())
    }
}

/// Notes the end of each enqueued instruction as soon as it has passed.
fn poll(recording: &Recording, backend: &dyn Backend, incoming: &Receiver<Enqueued>) {
    let mut lanes: [VecDeque<Enqueued>; Lane::ALL.len()] = Default::default();
    let mut more = true;
    while more || lanes.iter().any(|lane| !lane.is_empty()) {
        loop {
            match incoming.try_recv() {
                Ok(next) => lanes[next.mark.lane.index()].push_back(next),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    more = false;
                    break;
                }
            }
        }
        for lane in &mut lanes {
            while let Some(first) = lane.front() {
                // A device that fails tells those who gave it the work.
                if !failed_or_passed(backend.passed(first.mark)) {
                    break;
                }
                lock(&recording.spans)[first.index].end = recording.now();
                lane.pop_front();
            }
        }
        std::hint::spin_loop();
    }
}

fn failed_or_passed(answer: Result<bool, DeviceError>) -> bool {
    answer.unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use gpurun_plan::{BufferId, InstrId, Op, Region};

    use super::*;

    #[test]
    fn enqueued_work_begins_behind_its_lane_and_what_it_waits_for() {
        let _limit = testkit::time_limit(10);
        let dst = Region { buffer: BufferId(0), start: 0, len: 0 };
        let instr = |lane, waits: &[u32]| Instr {
            op: Op::Zero { dst },
            lane,
            waits: waits.iter().map(|w| InstrId(*w)).collect(),
        };
        let instrs = vec![
            instr(Lane::Compute, &[]),
            instr(Lane::Gather, &[]),
            instr(Lane::Compute, &[1]),
            instr(Lane::Compute, &[]),
        ];
        let at = |start, end| Span { start, end };
        let mut spans = vec![at(0.1, 2.0), at(0.2, 3.0), at(0.3, 4.0), at(4.5, 5.0)];
        begin_after(&Program { instrs }, &mut spans);
        assert_eq!(spans, [at(0.1, 2.0), at(0.2, 3.0), at(3.0, 4.0), at(4.5, 5.0)]);
    }
}
