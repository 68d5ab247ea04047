//! What a worker tells while it works: where it is, at the price of a few atomic operations, and what it did.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use gpurun_wire::{Beat, Failure, FailureKind, Level, Phase, Position, Slot, StepReport, StoreClient, ToLauncher};

use super::progress::{PlainProgress, TaskProgress, describe, describe_task};

/// Where the worker is, and words for its instructions.
#[derive(Default)]
pub(super) struct Track {
    pub(super) slot: Slot,
    /// Of a training step, and of an evaluation.
    words: RwLock<[Arc<[String]>; 2]>,
}

impl Track {
    pub(super) fn on(slot: Slot) -> Self {
        Self { slot, words: RwLock::default() }
    }

    pub(super) fn beat(&self) -> Beat {
        let (position, progress) = self.slot.read();
        Beat { position, progress }
    }

    fn at(&self, index: u32, waiting: bool) {
        let words = self.words.read().unwrap_or_else(PoisonError::into_inner);
        let program = &words[usize::from(self.slot.current_phase() == Phase::Evaluating)];
        let text = program.get(index as usize).map_or("", String::as_str);
        self.slot.at(index, text, waiting);
    }
}

/// A handle to tell the launcher what this rank does. Cheap to clone, and cheap to use: a change of position is a few
/// relaxed stores, and a thread of its own sends beats.
///
/// With no launcher, rank 0 prints what a launcher would show.
#[derive(Clone)]
pub struct Reporter {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) rank: u32,
    pub(super) track: Arc<Track>,
    pub(super) client: Option<Arc<StoreClient>>,
    /// A launcher shows things; without one, rank 0 prints them.
    pub(super) launched: bool,
    /// Signal that asked this process to stop, when there is no launcher; 0 for none.
    pub(super) stop_signal: Arc<AtomicUsize>,
    pub(super) plain: Mutex<PlainProgress>,
    pub(super) tasks: Mutex<TaskProgress>,
}

impl Reporter {
    /// The worker enters a phase in `step` (from 1; 0 before the first).
    pub fn phase(&self, step: u64, phase: Phase) {
        self.inner.track.slot.phase(step, phase);
    }

    /// The worker begins instruction `index` of the program of its phase.
    pub fn at(&self, index: u32) {
        self.inner.track.at(index, false);
    }

    /// The worker waits for other ranks in instruction `index`.
    pub fn waiting_in(&self, index: u32) {
        self.inner.track.at(index, true);
    }

    /// The worker got on, wherever it is: something long is alive.
    pub fn progressed(&self) {
        self.inner.track.slot.progressed();
    }

    /// Words for the instructions of a training step and of an evaluation, for example `backward h.2 micro 0`.
    pub fn words(&self, train: &[String], evaluate: &[String]) {
        let mut words = self.inner.track.words.write().unwrap_or_else(PoisonError::into_inner);
        *words = [train.into(), evaluate.into()];
    }

    /// Where the worker is now.
    #[must_use]
    pub fn position(&self) -> Position {
        self.inner.track.slot.read().0
    }

    /// A step is done. Rank 0's report is shown.
    pub fn step_done(&self, report: &StepReport) {
        self.progressed();
        if self.inner.rank != 0 {
            return;
        }
        if self.inner.launched {
            self.send(&ToLauncher::Step(report.clone()));
        } else if self.inner.plain.lock().unwrap_or_else(PoisonError::into_inner).wants(report) {
            print(&describe(report));
        }
    }

    /// Something long before or between steps gets on, such as tokenising: `done` of `total`, in any unit. Rank 0's report is
    /// shown, as often as a reader can follow.
    pub fn task(&self, what: &str, done: u64, total: u64) {
        self.progressed();
        if self.inner.rank != 0 || !self.inner.tasks.lock().unwrap_or_else(PoisonError::into_inner).wants(done, total) {
            return;
        }
        if self.inner.launched {
            self.send(&ToLauncher::Task { what: what.to_owned(), done, total });
        } else {
            print(&describe_task(what, done, total));
        }
    }

    /// A checkpoint is complete. Rank 0's report is shown.
    pub fn saved(&self, step: u64, dir: &Path) {
        self.progressed();
        if self.inner.launched {
            self.send(&ToLauncher::Saved { step, dir: dir.display().to_string() });
        } else if self.inner.rank == 0 {
            print(&format!("checkpoint of step {step}: {}", dir.display()));
        }
    }

    /// A line for the user: a note goes to standard output, a warning to standard error.
    pub fn line(&self, level: Level, text: &str) {
        if self.inner.launched {
            self.send(&ToLauncher::Line { level, text: text.to_owned() });
        } else if level == Level::Warning {
            eprintln!("warning: {text}");
        } else {
            print(text);
        }
    }

    /// True when the run is to end at the next step boundary.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        let asked = self.inner.client.as_ref().is_some_and(|client| client.stop_requested());
        asked || self.inner.stop_signal.load(Ordering::Relaxed) != 0
    }

    /// Tells of this rank's failure. [`Worker::run`](super::Worker::run) does this for what its work returns.
    pub fn failed(&self, kind: FailureKind, message: &str, exit_code: u8, secondary: bool) {
        let (rank, position) = (self.inner.rank, self.position());
        let message = cut(message);
        let failure =
            Failure { rank, position: position.clone(), kind, message: message.clone(), exit_code, secondary };
        let told = self.inner.client.as_ref().is_some_and(|client| client.send(&ToLauncher::Failure(failure)).is_ok());
        if !(told && self.inner.launched) {
            let what = if kind == FailureKind::Panic { "panicked" } else { "failed" };
            eprintln!("gpurun: rank {rank} {what} {position}: {message}");
        }
    }

    pub(super) fn finished(&self, summary: &str) {
        self.phase(self.position().step, Phase::Done);
        self.send(&ToLauncher::Finished { summary: summary.to_owned() });
        if !self.inner.launched && self.inner.rank == 0 && !summary.is_empty() {
            print(summary);
        }
    }

    /// A broken connection is told to the worker by the abort that comes with it.
    fn send(&self, message: &ToLauncher) {
        if let Some(client) = &self.inner.client {
            let _broken = client.send(message);
        }
    }
}

/// A reader of this process's output that has gone away is no reason to end a run.
fn print(line: &str) {
    let _reader_gone = std::io::Write::write_all(&mut std::io::stdout(), format!("{line}\n").as_bytes());
}

/// A message that fits a frame with room to spare.
fn cut(message: &str) -> String {
    const LONGEST: usize = 64 << 10;
    match message.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} ...", &message[..end]),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reporter() -> Reporter {
        let inner = Inner {
            rank: 1,
            track: Arc::default(),
            client: None,
            launched: false,
            stop_signal: Arc::default(),
            plain: Mutex::default(),
            tasks: Mutex::new(TaskProgress::new(std::time::Duration::ZERO)),
        };
        Reporter { inner: Arc::new(inner) }
    }

    #[test]
    fn positions_read_as_text() {
        let _limit = testkit::time_limit(10);
        let reporter = reporter();
        assert_eq!(reporter.position().to_string(), "before the first step (starting)");
        reporter.words(&["load batch 0".into(), "backward h.2 micro 0".into()], &["forward wte".into()]);
        reporter.phase(12, Phase::Step);
        reporter.at(1);
        assert_eq!(reporter.position().to_string(), "in step 12, instruction 1 (backward h.2 micro 0)");
        assert!(!reporter.position().waiting);
        reporter.waiting_in(0);
        assert!(reporter.position().waiting);
        assert_eq!(reporter.position().to_string(), "in step 12, instruction 0 (load batch 0)");
        reporter.phase(12, Phase::Evaluating);
        reporter.at(0);
        assert_eq!(reporter.position().to_string(), "in the evaluation after step 12, instruction 0 (forward wte)");
        reporter.phase(12, Phase::Boundary);
        assert!(reporter.position().waiting);
    }

    #[test]
    fn every_change_is_progress() {
        let _limit = testkit::time_limit(10);
        let reporter = reporter();
        let progress = |reporter: &Reporter| reporter.inner.track.beat().progress;
        let mut before = progress(&reporter);
        let changes: [&dyn Fn(&Reporter); 5] =
            [&|r| r.phase(1, Phase::Step), &|r| r.at(0), &|r| r.waiting_in(0), &|r| r.progressed(), &|r| {
                r.step_done(&StepReport::default())
            }];
        for change in changes {
            change(&reporter);
            assert!(progress(&reporter) > before);
            before = progress(&reporter);
        }
    }
}
