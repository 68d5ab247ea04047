//! The messages, as plain data.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The secret of a job: who knows it may speak to the store.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// From its text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for the environment of a worker.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Compares in a time that does not depend on where the two differ.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let (a, b) = (self.0.as_bytes(), other.0.as_bytes());
        a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (x, y)| difference | (x ^ y)) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// What a worker is doing, coarsely.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Phase {
    /// Before the first step: libraries, rendezvous, plan, initial weights.
    #[default]
    Starting,
    /// Turning text into tokens.
    Tokenising,
    /// In a training step.
    Step,
    /// At a step boundary, waiting for the other ranks.
    Boundary,
    /// Evaluating held-out data.
    Evaluating,
    /// Writing a checkpoint.
    Saving,
    /// Finished; only the end of the process is left.
    Done,
}

impl Phase {
    /// Every phase, in the order of their numbers.
    pub const ALL: [Self; 7] =
        [Self::Starting, Self::Tokenising, Self::Step, Self::Boundary, Self::Evaluating, Self::Saving, Self::Done];

    /// The phase of a number, as `phase as u8` gave it.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

/// Where a worker is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Coarse activity.
    pub phase: Phase,
    /// Training step, from 1; 0 before the first.
    pub step: u64,
    /// Index of the instruction in the program of the step.
    pub instruction: Option<u32>,
    /// The instruction, for example `backward h.2 micro 0`; empty when there is none.
    pub text: String,
    /// True while it waits for other ranks (a collective, a message, a barrier).
    pub waiting: bool,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, .. } = self;
        match self.phase {
            Phase::Starting => write!(f, "before the first step (starting)")?,
            Phase::Tokenising => write!(f, "before the first step (tokenising)")?,
            Phase::Step => write!(f, "in step {step}")?,
            Phase::Boundary => write!(f, "at the end of step {step}")?,
            Phase::Evaluating => write!(f, "in the evaluation after step {step}")?,
            Phase::Saving => write!(f, "in the checkpoint of step {step}")?,
            Phase::Done => write!(f, "after its last step")?,
        }
        if let Some(index) = self.instruction {
            write!(f, ", instruction {index}")?;
            if !self.text.is_empty() {
                write!(f, " ({})", self.text)?;
            }
        }
        Ok(())
    }
}

/// What one step did, for the display.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Steps done, this one included.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Mean loss per token over the global batch, in nats.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens seen so far, over all ranks.
    pub tokens: u64,
    /// Tokens per second of this step, over all ranks.
    pub tokens_per_second: f64,
    /// Wall-clock seconds of this step.
    pub step_seconds: f64,
    /// Model FLOPs over the devices' peak, where the peak is known.
    pub mfu: Option<f64>,
    /// Bytes that the rank's plan has where the model runs; 0 when they are not told.
    pub memory_planned: u64,
    /// Most bytes that the rank has taken there so far, context and libraries included.
    pub memory_used: Option<u64>,
    /// Loss scale, where there is one.
    pub loss_scale: Option<f64>,
    /// True when gradients were not finite and the weights were left alone.
    pub skipped: bool,
    /// Mean held-out loss, on steps that evaluate.
    pub eval_loss: Option<f64>,
}

/// How a worker failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// It returned an error.
    Error,
    /// It panicked.
    Panic,
    /// A wait for another rank ran past its deadline: the other rank is to blame.
    Timeout,
}

/// A worker's own account of its failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Whose.
    pub rank: u32,
    /// Where it was.
    pub position: Position,
    /// How.
    pub kind: FailureKind,
    /// What happened, in one line or few.
    pub message: String,
    /// The exit code that the worker will end with.
    pub exit_code: u8,
    /// It only noticed that another rank failed: never the first cause.
    pub secondary: bool,
}

/// Weight of a line from the program to its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Level {
    /// Worth knowing.
    Note,
    /// Something is not as it should be.
    Warning,
}

/// From a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToLauncher {
    /// First of all: who it is.
    Hello {
        /// Its rank.
        rank: u32,
        /// How many ranks it expects.
        world: u32,
        /// The job's secret.
        token: Token,
        /// Its process.
        pid: u32,
    },
    /// It lives.
    Beat {
        /// Where it is.
        position: Position,
        /// Grows whenever the worker gets on. Only its change means something.
        progress: u64,
    },
    /// A step is done.
    Step(StepReport),
    /// Something long before or between steps gets on.
    Task {
        /// What is being done, for example `tokenising a.txt`.
        what: String,
        /// How much of it is done.
        done: u64,
        /// How much there is; as much as is done when it is over.
        total: u64,
    },
    /// A checkpoint is complete.
    Saved {
        /// After which step.
        step: u64,
        /// Where.
        dir: String,
    },
    /// A line for the user.
    Line {
        /// Weight.
        level: Level,
        /// The line.
        text: String,
    },
    /// It fails.
    Failure(Failure),
    /// It did all that was asked.
    Finished {
        /// A few lines for the user; empty when there is nothing to say.
        summary: String,
    },
    /// Sets a key of the store.
    Set {
        /// The key.
        key: String,
        /// The value.
        value: Vec<u8>,
    },
    /// Wants a key of the store, now or when it is set.
    Get {
        /// The key.
        key: String,
        /// Comes back with the value.
        id: u32,
    },
}

/// To a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The worker is known.
    Welcome {
        /// Milliseconds between beats.
        beat_millis: u32,
    },
    /// The worker may not join.
    Refused {
        /// Why.
        reason: String,
    },
    /// The value of a key.
    Value {
        /// As in [`ToLauncher::Get`].
        id: u32,
        /// The value.
        value: Vec<u8>,
    },
    /// End at the next step boundary, with a checkpoint if there is a place for it.
    Stop,
    /// End now: another rank failed, or the job is given up.
    Abort {
        /// Why.
        reason: String,
    },
}
