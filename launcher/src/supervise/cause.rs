//! Which of many failures came first, and what it means.

use std::fmt;
use std::time::Duration;

use gpurun_wire::{Failure, FailureKind, Position};

use super::{RankState, State, Status};

/// An exit code counts as this much later than seen: it may be what a crash did to a peer (a closed connection), seen before
/// the crash itself, above all while a core file is written.
const CRASH_IS_SEEN_LATE: Duration = Duration::from_millis(500);

/// What a rank did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Its process ended.
    Ended(Status),
    /// It said what went wrong.
    Failed(FailureKind, String),
    /// It held the others up.
    Hung {
        /// Its process is stopped.
        stopped: bool,
        /// Whole seconds without a sign of progress.
        seconds: u64,
    },
}

/// The first cause of a job's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Whose.
    pub rank: u32,
    /// What it did.
    pub what: What,
    /// Where it was, when it takes part in the protocol.
    pub position: Option<Position>,
    /// The launcher's exit code for it.
    pub exit_code: u8,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        match &self.what {
            What::Ended(Status::Code(code)) => write!(f, " exited with code {code}")?,
            What::Ended(Status::Signal { number, core }) => {
                write!(f, " was killed by {}", signal_name(*number))?;
                if *core {
                    write!(f, " (core dumped)")?;
                }
            }
            What::Failed(FailureKind::Panic, _) => write!(f, " panicked")?,
            What::Failed(..) => write!(f, " failed")?,
            What::Hung { stopped: true, seconds } => write!(f, " has been stopped (SIGSTOP) for {seconds} s")?,
            What::Hung { stopped: false, seconds } => write!(f, " has not moved for {seconds} s")?,
        }
        if let Some(position) = &self.position {
            write!(f, " {position}")?;
        }
        if let What::Failed(_, message) = &self.what {
            write!(f, ": {message}")?;
        }
        Ok(())
    }
}

/// Name of a signal, such as `SIGKILL`.
pub fn signal_name(number: i32) -> String {
    let names = [
        (1, "SIGHUP"),
        (2, "SIGINT"),
        (3, "SIGQUIT"),
        (4, "SIGILL"),
        (5, "SIGTRAP"),
        (6, "SIGABRT"),
        (7, "SIGBUS"),
        (8, "SIGFPE"),
        (9, "SIGKILL"),
        (10, "SIGUSR1"),
        (11, "SIGSEGV"),
        (12, "SIGUSR2"),
        (13, "SIGPIPE"),
        (14, "SIGALRM"),
        (15, "SIGTERM"),
        (24, "SIGXCPU"),
        (25, "SIGXFSZ"),
        (31, "SIGSYS"),
    ];
    let name = names.iter().find(|(n, _)| *n == number);
    name.map_or_else(|| format!("signal {number}"), |(_, name)| (*name).to_owned())
}

/// True when a rank ended in a way that this launcher did not ask for.
pub(super) fn is_own_fault(r: &RankState, status: Status) -> bool {
    match status {
        Status::Code(0) => false,
        Status::Code(_) => !r.told || r.attached && r.aborted_at.is_none(),
        Status::Signal { number, .. } => !r.sent.contains(&number),
    }
}

/// The first cause: what a rank did by itself goes before what it only noticed of another one, and earlier before later.
pub(super) fn first(state: &State) -> Option<Cause> {
    let mut candidates: Vec<((bool, Duration), Cause)> = Vec::new();
    for (rank, r) in (0..).zip(&state.ranks) {
        if let Some((at, failure)) = &r.failure {
            candidates.push(((failure.secondary, *at), of_failure(failure)));
        }
        if let Some((at, status)) = r.exit
            && is_own_fault(r, status)
            && (r.failure.is_none() || matches!(status, Status::Signal { .. }))
        {
            let crash = matches!(status, Status::Signal { .. });
            let at = if crash { at } else { at + CRASH_IS_SEEN_LATE };
            candidates.push(((false, at), of_exit(rank, r, status)));
        }
    }
    if let Some(hang) = &state.hang {
        let r = &state.ranks[hang.rank as usize];
        let what = What::Hung { stopped: hang.stopped, seconds: hang.silent_for.as_secs() };
        let position = r.attached.then(|| r.position.clone());
        // The accusation of a rank whose wait ran out has the same time, and must not win.
        candidates.insert(0, ((false, hang.at), Cause { rank: hang.rank, what, position, exit_code: 6 }));
    }
    candidates.into_iter().min_by_key(|(key, _)| *key).map(|(_, cause)| cause)
}

fn of_failure(failure: &Failure) -> Cause {
    Cause {
        rank: failure.rank,
        what: What::Failed(failure.kind, failure.message.clone()),
        position: Some(failure.position.clone()),
        exit_code: if matches!(failure.exit_code, 2..=7) { failure.exit_code } else { 4 },
    }
}

fn of_exit(rank: u32, r: &RankState, status: Status) -> Cause {
    let exit_code = match status {
        // Only a program that takes part in the protocol means the same by these codes.
        Status::Code(code @ (2 | 3 | 5 | 6 | 7)) if r.attached => code as u8,
        _ => 4,
    };
    Cause { rank, what: What::Ended(status), position: r.attached.then(|| r.position.clone()), exit_code }
}
