//! The last lines of a job.

use std::path::Path;

use gpurun_wire::FailureKind;

use crate::supervise::{Cause, Interrupt, Status, Verdict, What};

/// What the user is told when a job ended other than well: the first cause on top. `out_of_memory`: the kernel killed
/// processes for lack of memory meanwhile.
pub fn of(verdict: &Verdict, logs: &Path, out_of_memory: bool) -> Vec<String> {
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
        if out_of_memory && matches!(cause.what, What::Ended(Status::Signal { number: 9, .. })) {
            lines.push("gpurun: the kernel killed a process for lack of memory meanwhile: see dmesg".to_owned());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(what: What, exit_code: u8) -> Verdict {
        let cause = Some(Cause { rank: 1, what, position: None, exit_code });
        Verdict { exit_code, cause, interrupt: None, killed: vec![0], stuck: vec![] }
    }

    #[test]
    fn a_lack_of_memory_explains_a_kill_and_nothing_else() {
        let _limit = testkit::time_limit(10);
        let killed = verdict(What::Ended(Status::Signal { number: 9, core: false }), 4);
        let lines = of(&killed, Path::new("/logs"), true);
        assert_eq!(
            lines,
            [
                "gpurun: rank 1 was killed by SIGKILL",
                "gpurun: the kernel killed a process for lack of memory meanwhile: see dmesg",
                "gpurun: exit 4; logs: /logs/rank-*.log",
            ]
        );
        assert_eq!(of(&killed, Path::new("/logs"), false).len(), 2);
        assert_eq!(of(&verdict(What::Ended(Status::Code(1)), 4), Path::new("/logs"), true).len(), 2);
    }

    #[test]
    fn a_users_mistake_is_his_message_alone() {
        let _limit = testkit::time_limit(10);
        let mistake = verdict(What::Failed(FailureKind::Error, "--lr NaN: give a number".to_owned()), 2);
        assert_eq!(of(&mistake, Path::new("/logs"), false), ["gpurun: --lr NaN: give a number"]);
    }
}
