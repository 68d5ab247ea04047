//! Supervision as a pure function: what happened and when goes in, what to do comes out. No process, clock or socket here.

mod cause;
#[cfg(test)]
mod tests;

use std::time::Duration;

use gpurun_wire::{Failure, FailureKind, Phase, Position};

pub use cause::{Cause, What};

/// Time that ranks get to end by themselves after another one failed.
const GRACE_AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Time that ranks get to end by themselves after an interrupt: a checkpoint is written in it.
const GRACE_AFTER_INTERRUPT: Duration = Duration::from_secs(30);
/// How long a failure that points at another rank waits for that rank's own account.
const SETTLE: Duration = Duration::from_millis(300);
/// How long an attached rank has, once told to abort, before SIGTERM.
const ABORT_BEFORE_TERM: Duration = Duration::from_millis(400);
/// A pause between ticks beyond this means that the launcher itself did not run.
const LAUNCHER_PAUSED: Duration = Duration::from_secs(2);
/// Before its first step and after its last one a rank may take this many times the hang timeout between two signs of
/// progress: libraries and drivers are slow to start and to end.
const PATIENCE_AT_ENDS: u32 = 5;
/// A process that lives this long after SIGKILL is stuck in the kernel, and not waited for.
const STUCK: Duration = Duration::from_secs(10);
/// Used where a limit for a checkpoint's progress is needed and hang detection is off.
const SAVE_STALL: Duration = Duration::from_secs(60);

/// What the user chose.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of ranks.
    pub world: u32,
    /// Time between asking ranks to end and killing them; `None` for one second after a failure and thirty after an
    /// interrupt.
    pub grace: Option<Duration>,
    /// Without progress for this long, a rank hangs; `None` for never.
    pub hang_timeout: Option<Duration>,
    /// How often a failed job is started again.
    pub max_restarts: u32,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal {
        /// Which.
        number: i32,
        /// With a core file.
        core: bool,
    },
}

/// The user, or the system, wants the job to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Ctrl-C.
    Int,
    /// A job manager's polite request.
    Term,
    /// The terminal is gone.
    Hup,
}

impl Interrupt {
    /// The signal's number.
    pub const fn number(self) -> i32 {
        match self {
            Self::Hup => 1,
            Self::Int => 2,
            Self::Term => 15,
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time passed.
    Tick,
    /// A rank has greeted the store: it takes part in the protocol from now on.
    Attached(u32),
    /// A sign of life.
    Beat(u32),
    /// Where a rank is, by its own notes, and its progress counter. Says nothing about whether it lives.
    Seen(u32, Position, u64),
    /// A rank's own account of its failure.
    Failed(Failure),
    /// A rank's process ended; its output may not be read to the end yet.
    Exited(u32, Status),
    /// Nothing of a rank is left: no process of its group, no unread output.
    Gone(u32),
    /// Whether a rank's process is stopped (SIGSTOP), as the kernel says.
    Stopped(u32, bool),
    /// A signal to the launcher.
    Interrupt(Interrupt),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a rank to end at its next step boundary.
    Stop(u32),
    /// Tell a rank to give up.
    Abort(u32, String),
    /// Send a signal to a rank's process group.
    Signal(u32, i32),
    /// Kill what is left of a rank's process group.
    Kill(u32),
    /// All ranks are gone: start them again.
    Restart(Cause),
    /// All ranks are gone: report and end.
    Done(Verdict),
}

/// How the job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// For the launcher's own exit.
    pub exit_code: u8,
    /// What went wrong first.
    pub cause: Option<Cause>,
    /// The interrupt that ended it.
    pub interrupt: Option<Interrupt>,
    /// Ranks that had to be killed because they did not end in time.
    pub killed: Vec<u32>,
    /// Ranks that are still there, for the kernel does not let them die.
    pub stuck: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
struct RankState {
    attached: bool,
    position: Position,
    progress: u64,
    moved_at: Duration,
    beat_at: Duration,
    stopped_since: Option<Duration>,
    failure: Option<(Duration, Failure)>,
    exit: Option<(Duration, Status)>,
    gone: bool,
    /// Told to end, by whatever means.
    told: bool,
    aborted_at: Option<Duration>,
    /// Signals that this launcher sent.
    sent: Vec<i32>,
    killed_at: Option<Duration>,
}

impl RankState {
    fn alive(&self) -> bool {
        self.exit.is_none()
    }

    fn is_stuck(&self, now: Duration) -> bool {
        self.alive() && self.killed_at.is_some_and(|at| now.saturating_sub(at) >= STUCK)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    Running,
    /// Ranks were asked to end in order.
    Stopping(Duration),
    /// Ranks must end.
    Ending(Duration),
}

#[derive(Clone, Debug)]
struct Hang {
    at: Duration,
    rank: u32,
    stopped: bool,
    silent_for: Duration,
}

/// Everything supervision knows.
#[derive(Clone, Debug)]
pub struct State {
    options: Options,
    attempt: u32,
    course: Course,
    interrupt: Option<Interrupt>,
    hang: Option<Hang>,
    ranks: Vec<RankState>,
    last_tick: Duration,
}

impl State {
    /// At the start of the first attempt.
    pub fn new(options: Options, now: Duration) -> Self {
        let mut state = Self {
            options,
            attempt: 0,
            course: Course::Running,
            interrupt: None,
            hang: None,
            ranks: Vec::new(),
            last_tick: now,
        };
        state.reset(now);
        state
    }

    /// At the start of another attempt.
    pub fn restart(&mut self, now: Duration) {
        self.attempt += 1;
        self.course = Course::Running;
        self.hang = None;
        self.reset(now);
    }

    /// Number of the current attempt, from 0.
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    fn reset(&mut self, now: Duration) {
        let fresh = RankState { moved_at: now, beat_at: now, ..RankState::default() };
        self.ranks = vec![fresh; self.options.world as usize];
        self.last_tick = now;
    }

    fn saving(&self, now: Duration) -> bool {
        let stall = self.options.hang_timeout.unwrap_or(SAVE_STALL);
        self.ranks.iter().any(|r| {
            r.attached && r.alive() && r.position.phase == Phase::Saving && now.saturating_sub(r.moved_at) < stall
        })
    }
}

/// Takes note of an event at time `now` (since any fixed start) and says what to do.
pub fn decide(state: &mut State, event: &Event, now: Duration) -> Vec<Action> {
    let mut actions = Vec::new();
    note(state, event, now);
    match event {
        Event::Interrupt(interrupt) => interrupted(state, *interrupt, now, &mut actions),
        Event::Attached(rank) => match state.course {
            Course::Running => {}
            Course::Stopping(_) => actions.push(Action::Stop(*rank)),
            Course::Ending(_) => actions.push(Action::Abort(*rank, "the job is ending".to_owned())),
        },
        Event::Tick => look_for_hang(state, now),
        _ => {}
    }
    if !matches!(state.course, Course::Ending(_)) && must_end(state, now) {
        state.course = Course::Ending(now);
    }
    match state.course {
        Course::Running => {}
        Course::Stopping(since) => press_stopping(state, since, now, &mut actions),
        Course::Ending(since) => press_ending(state, since, now, &mut actions),
    }
    if state.ranks.iter().all(|r| r.gone || r.is_stuck(now)) {
        actions.push(conclude(state, now));
    }
    actions
}

fn note(state: &mut State, event: &Event, now: Duration) {
    match event {
        Event::Attached(rank) => {
            let r = &mut state.ranks[*rank as usize];
            (r.attached, r.moved_at, r.beat_at) = (true, now, now);
        }
        Event::Beat(rank) => state.ranks[*rank as usize].beat_at = now,
        Event::Seen(rank, position, progress) => {
            let r = &mut state.ranks[*rank as usize];
            if r.progress != *progress {
                r.moved_at = now;
            }
            r.progress = *progress;
            r.position = position.clone();
        }
        Event::Failed(failure) => {
            let r = &mut state.ranks[failure.rank as usize];
            // A failing rank may send its account of an error after that of the panic that caused it: the first counts.
            if r.failure.is_none() {
                r.position = failure.position.clone();
                r.failure = Some((now, failure.clone()));
            }
            if failure.kind == FailureKind::Timeout && state.hang.is_none() {
                state.hang = culprit(state, now, Some(failure.rank));
            }
        }
        Event::Exited(rank, status) => state.ranks[*rank as usize].exit = Some((now, *status)),
        Event::Gone(rank) => state.ranks[*rank as usize].gone = true,
        Event::Stopped(rank, stopped) => {
            let since = &mut state.ranks[*rank as usize].stopped_since;
            *since = if *stopped { since.or(Some(now)) } else { None };
        }
        Event::Tick | Event::Interrupt(_) => {}
    }
}

fn interrupted(state: &mut State, interrupt: Interrupt, now: Duration, actions: &mut Vec<Action>) {
    if state.course != Course::Running {
        for (rank, r) in (0..).zip(&mut state.ranks) {
            kill(rank, r, now, actions);
        }
        return;
    }
    state.interrupt = Some(interrupt);
    state.course = Course::Stopping(now);
    for (rank, r) in (0..).zip(&mut state.ranks) {
        if !r.alive() {
            continue;
        }
        r.told = true;
        if r.attached {
            actions.push(Action::Stop(rank));
        } else {
            r.sent.push(interrupt.number());
            actions.push(Action::Signal(rank, interrupt.number()));
        }
    }
}

/// True when something happened that no rank can go on after.
fn must_end(state: &State, now: Duration) -> bool {
    state.hang.is_some()
        || state.ranks.iter().any(|r| {
            let failed = match &r.failure {
                Some((at, failure)) if failure.secondary => now.saturating_sub(*at) >= SETTLE,
                Some(_) => true,
                None => false,
            };
            failed || r.failure.is_none() && r.exit.is_some_and(|(_, status)| cause::is_own_fault(r, status))
        })
}

/// After an interrupt: ranks have the grace time, or as long as a checkpoint gets on.
fn press_stopping(state: &mut State, since: Duration, now: Duration, actions: &mut Vec<Action>) {
    let grace = state.options.grace.unwrap_or(GRACE_AFTER_INTERRUPT);
    let last_call = grace - Duration::from_secs(1).min(grace / 2);
    if now.saturating_sub(since) < last_call || state.saving(now) {
        return;
    }
    let over = now.saturating_sub(since) >= grace;
    for (rank, r) in (0..).zip(&mut state.ranks) {
        if over {
            kill(rank, r, now, actions);
        } else {
            abort(rank, r, "the grace time is over", now, actions);
            signal(rank, r, 15, actions);
        }
    }
}

/// After a failure: abort, SIGTERM, SIGKILL, each only to who is left.
fn press_ending(state: &mut State, since: Duration, now: Duration, actions: &mut Vec<Action>) {
    let reason = cause::first(state).map_or_else(|| "the job is ending".to_owned(), |cause| cause.to_string());
    let saving = state.saving(now);
    let grace = state.options.grace.unwrap_or(GRACE_AFTER_FAILURE);
    for (rank, r) in (0..).zip(&mut state.ranks) {
        abort(rank, r, &reason, now, actions);
        let told = r.aborted_at.unwrap_or(since);
        if !r.attached || now.saturating_sub(told) >= ABORT_BEFORE_TERM.min(grace / 2) && !saving {
            signal(rank, r, 15, actions);
        }
        if now.saturating_sub(since) >= grace && !saving {
            kill(rank, r, now, actions);
        }
    }
}

fn abort(rank: u32, r: &mut RankState, reason: &str, now: Duration, actions: &mut Vec<Action>) {
    if r.alive() && r.attached && r.aborted_at.is_none() {
        r.aborted_at = Some(now);
        r.told = true;
        actions.push(Action::Abort(rank, reason.to_owned()));
    }
}

fn signal(rank: u32, r: &mut RankState, number: i32, actions: &mut Vec<Action>) {
    if r.alive() && !r.sent.contains(&number) {
        r.sent.push(number);
        r.told = true;
        actions.push(Action::Signal(rank, number));
    }
}

fn kill(rank: u32, r: &mut RankState, now: Duration, actions: &mut Vec<Action>) {
    if r.alive() && !r.sent.contains(&9) {
        r.sent.push(9);
        r.killed_at = Some(now);
        r.told = true;
        actions.push(Action::Kill(rank));
    }
}

fn look_for_hang(state: &mut State, now: Duration) {
    let gap = now.saturating_sub(state.last_tick);
    state.last_tick = now;
    if gap > LAUNCHER_PAUSED {
        // The launcher did not run (Ctrl-Z, a frozen machine), so nobody's silence in that time means anything.
        for r in &mut state.ranks {
            r.moved_at += gap;
            r.beat_at += gap;
            r.stopped_since = r.stopped_since.map(|since| since + gap);
        }
        return;
    }
    if state.hang.is_none() && state.course == Course::Running {
        state.hang = culprit(state, now, None);
    }
}

/// Who holds the others up, if anybody hangs. `accuser` is a rank whose wait ran past its own deadline.
fn culprit(state: &State, now: Duration, accuser: Option<u32>) -> Option<Hang> {
    let timeout = state.options.hang_timeout?;
    let hang = |rank: u32, since: Duration, stopped| {
        Some(Hang { at: now, rank, stopped, silent_for: now.saturating_sub(since) })
    };
    let left = || (0u32..).zip(&state.ranks).filter(|(_, r)| r.alive());
    let attached: Vec<(u32, &RankState)> = left().filter(|(_, r)| r.attached).collect();
    let stalled = |r: &RankState| {
        let slow = matches!(r.position.phase, Phase::Starting | Phase::Done);
        let patience = if slow { timeout * PATIENCE_AT_ENDS } else { timeout };
        // A process that is ending has closed its connection.
        let silent = r.position.phase != Phase::Done && now.saturating_sub(r.beat_at) >= timeout;
        silent || now.saturating_sub(r.moved_at) >= patience
    };
    // A stopped process holds up everybody who waits for it, whoever runs out of patience first.
    let somebody_waits = accuser.is_some() || attached.iter().any(|(_, r)| stalled(r));
    if let Some((rank, since)) = left().find_map(|(rank, r)| {
        let since = r.stopped_since?;
        (somebody_waits || now.saturating_sub(since) >= timeout).then_some((rank, since))
    }) {
        return hang(rank, since, true);
    }
    let suspects =
        || attached.iter().filter(|(rank, r)| accuser.map_or_else(|| stalled(r), |accuser| accuser != *rank));
    let silent_since =
        |r: &RankState| if r.position.phase == Phase::Done { r.moved_at } else { r.moved_at.min(r.beat_at) };
    if let Some((rank, r)) = suspects().filter(|(_, r)| !r.position.waiting).min_by_key(|(_, r)| silent_since(r)) {
        return hang(*rank, silent_since(r), false);
    }
    if attached.is_empty() || accuser.is_none() && !attached.iter().all(|(_, r)| stalled(r)) {
        return None;
    }
    // All wait. They wait for one that has not even joined, or for the one furthest behind.
    if let Some((rank, r)) = left().find(|(_, r)| !r.attached) {
        return hang(rank, silent_since(r), false);
    }
    let (rank, r) = suspects().min_by_key(|(rank, r)| (r.position.step, r.position.instruction, *rank))?;
    hang(*rank, silent_since(r), false)
}

fn conclude(state: &State, now: Duration) -> Action {
    let ranks_that = |is: &dyn Fn(&RankState) -> bool| -> Vec<u32> {
        (0..).zip(&state.ranks).filter(|(_, r)| is(r)).map(|(rank, _)| rank).collect()
    };
    let stuck = ranks_that(&|r| r.is_stuck(now));
    let cause = cause::first(state);
    let exit_code = match (&state.interrupt, &cause) {
        (Some(interrupt), _) => 128 + interrupt.number() as u8,
        (None, Some(cause)) => cause.exit_code,
        (None, None) => 0,
    };
    if let Some(cause) = &cause
        && state.interrupt.is_none()
        && matches!(exit_code, 4 | 6)
        && state.attempt < state.options.max_restarts
        && stuck.is_empty()
    {
        return Action::Restart(cause.clone());
    }
    let killed = ranks_that(&|r| r.killed_at.is_some());
    Action::Done(Verdict { exit_code, cause, interrupt: state.interrupt, killed, stuck })
}
