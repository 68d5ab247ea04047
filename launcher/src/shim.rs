//! Small modes of this executable that run between the launcher and the programs: they need no `unsafe`, because what has
//! to be set in a child is set by the child itself before it becomes the program.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::BufRead;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use gpurun_wire::{Address, Beat, Failure, FailureKind, Hooks, Position, StoreClient, ToLauncher, Token};
use rustix::process::{Pid, Signal};

/// First word of `gpurun __exec PARENT PROGRAM NAME ARGUMENTS`: dies with the launcher, and becomes the program.
pub const EXEC: &str = "__exec";
/// First word of `gpurun __guard`: outlives the launcher by a moment and clears away what the launcher could not.
pub const GUARD: &str = "__guard";

/// Runs one of these modes if the arguments name one.
pub fn enter(arguments: &[OsString]) -> Option<ExitCode> {
    match arguments.get(1)?.to_str()? {
        EXEC => Some(exec(&arguments[2..])),
        GUARD => Some(guard()),
        _ => None,
    }
}

fn exec(arguments: &[OsString]) -> ExitCode {
    let [parent, program, name, arguments @ ..] = arguments else {
        eprintln!("gpurun: {EXEC} is internal to gpurun");
        return ExitCode::from(2);
    };
    let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // The launcher may have died before the line above: then no signal will ever come.
    let still_there = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().to_string());
    if set.is_err() || still_there.as_deref().map(OsStr::new) != Some(parent) {
        return ExitCode::from(4);
    }
    let error = Command::new(program).arg0(name).args(arguments).exec();
    // The file was there a moment ago.
    let missing = error.kind() == std::io::ErrorKind::NotFound;
    let hint = if missing { " (the interpreter that its first line names is missing)" } else { "" };
    let message = format!("cannot run {}: {error}{hint}", name.to_string_lossy());
    if report(&message).is_none() {
        eprintln!("gpurun: {message}");
    }
    ExitCode::from(2)
}

/// Tells the launcher why the program could not be started. `None` when that fails too.
fn report(message: &str) -> Option<()> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    let address: Address = std::env::var("GPURUN_STORE").ok()?.parse().ok()?;
    let rank = number("RANK")?;
    let hello = ToLauncher::Hello {
        rank,
        world: number("WORLD_SIZE")?,
        token: Token::new(std::env::var("GPURUN_TOKEN").ok()?),
        pid: std::process::id(),
    };
    let hooks = Hooks { beat: Box::new(Beat::default), aborted: Box::new(|_| {}) };
    let client = StoreClient::connect(&address, &hello, Duration::from_secs(5), hooks).ok()?;
    let failure = Failure {
        rank,
        position: Position::default(),
        kind: FailureKind::Error,
        message: message.to_owned(),
        exit_code: 2,
        secondary: false,
    };
    client.send(&ToLauncher::Failure(failure)).ok()
}

/// Reads `+PID` and `-PID` lines, and kills the process groups that are left when the other end is closed: that is how
/// grandchildren die when the launcher itself was killed with SIGKILL.
fn guard() -> ExitCode {
    let mut groups = HashSet::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let (sign, number) = line.split_at(line.len().min(1));
        if let Some(pid) = number.parse().ok().and_then(Pid::from_raw) {
            match sign {
                "+" => groups.insert(pid),
                _ => groups.remove(&pid),
            };
        }
    }
    for group in groups {
        // A group that is gone already is what is wanted.
        let _gone = rustix::process::kill_process_group(group, Signal::KILL);
    }
    ExitCode::SUCCESS
}
