//! The last lines of a job.

use std::path::Path;

use gpurun_wire::FailureKind;

use crate::supervise::{Cause, Interrupt, Verdict, What};

/// What the user is told when a job ended other than well: the first cause on top.
pub fn of(verdict: &Verdict, logs: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(interrupt) = verdict.interrupt {
        let by = match interrupt {
            Interrupt::Int => "SIGINT (Ctrl-C)",
            Interrupt::Term => "SIGTERM",
            Interrupt::Hup => "SIGHUP (the terminal is gone)",
        };
        lines.push(format!("gpurun: interrupted by {by}"));
    }
    if let Some(cause) = &verdict.cause {
        lines.push(format!("gpurun: {}", describe(cause)));
    }
    if verdict.interrupt.is_some() && !verdict.killed.is_empty() {
        let ranks: Vec<String> = verdict.killed.iter().map(u32::to_string).collect();
        lines.push(format!("gpurun: rank {} did not end in time and was killed", ranks.join(", ")));
    }
    for rank in &verdict.stuck {
        lines.push(format!(
            "gpurun: rank {rank} is still there: it does not die of SIGKILL (a driver or a file system hangs)"
        ));
    }
    if verdict.exit_code != 0 && !is_users_mistake(verdict.cause.as_ref()) {
        lines.push(format!("gpurun: exit {}; logs: {}/rank-*.log", verdict.exit_code, logs.display()));
    }
    lines
}

/// One line, or the lines of the worker's own message.
pub fn describe(cause: &Cause) -> String {
    if let What::Failed(FailureKind::Error, message) = &cause.what
        && is_users_mistake(Some(cause))
    {
        return message.clone();
    }
    cause.to_string()
}

/// Wrong options or input: every rank says the same, so which one was first means nothing, and logs add nothing.
fn is_users_mistake(cause: Option<&Cause>) -> bool {
    cause.is_some_and(|cause| cause.exit_code == 2 && matches!(cause.what, What::Failed(FailureKind::Error, _)))
}
