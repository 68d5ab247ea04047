//! One rank's process: started in a group of its own, read to the last byte, and cleared away whole.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::cli::{Job, Program};
use crate::display::{Display, Stream};
use crate::output::LineSplitter;
use crate::run::Incoming;
use crate::shim;
use crate::supervise::Status;

/// Time that processes a rank leaves behind (the `tee` of a script) have to say their last words.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Time to read what is left in a pipe that a process outside the group still holds open.
const LEFT_OVERS: Duration = Duration::from_millis(200);

/// A rank's process group, for as long as its number surely means this rank.
#[derive(Clone, Debug)]
pub struct Group {
    pid: Pid,
    cleared: Arc<AtomicBool>,
}

impl Group {
    /// The number of the process, which is also that of its group.
    pub fn number(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// The same number, as a process.
    pub const fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal to all processes of the group that are left.
    pub fn signal(&self, number: i32) {
        if !self.cleared.load(Ordering::Relaxed)
            && let Some(signal) = Signal::from_named_raw(number)
        {
            // "No such process" is what a signal to an ended group gives, and is as good.
            let _ended = rustix::process::kill_process_group(self.pid, signal);
        }
    }

    /// True when the kernel says that the rank's process is stopped, as by SIGSTOP.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.number())).unwrap_or_default();
        // The state follows the name, which is in brackets and may hold anything.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    }
}

/// Starts a rank.
///
/// # Errors
/// When the system has no process or descriptor left.
pub fn start(
    rank: u32,
    job: &Job,
    variables: Vec<(&'static str, OsString)>,
    display: &Display,
    events: mpsc::Sender<Incoming>,
) -> anyhow::Result<Group> {
    let what = || format!("cannot start rank {rank}");
    let mut command = Command::new("/proc/self/exe");
    command.arg0("gpurun").arg(shim::EXEC).arg(std::process::id().to_string());
    match &job.program {
        Program::Builtin(name) => {
            let this = std::env::current_exe().with_context(what)?;
            command.arg(this).arg("gpurun").arg(name);
        }
        Program::Other(path) => {
            command.arg(path).arg(&job.name);
        }
    }
    command.args(&job.arguments).envs(variables).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Listens before there is a child, so that its end cannot be missed.
    let children = signal(SignalKind::child()).with_context(what)?;
    let mut child = command.spawn().with_context(what)?;
    let pid = Pid::from_child(&child);
    let group = Group { pid, cleared: Arc::default() };
    let pipes = (child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
    let followed = (|| {
        let (Some(out), Some(err)) = pipes else { anyhow::bail!("no pipes") };
        let (close, closing) = watch::channel(false);
        let readers = [(out, Stream::Out), (err, Stream::Err)].map(|(pipe, stream)| {
            let receiver = pipe::Receiver::from_owned_fd(pipe)?;
            Ok::<_, std::io::Error>(pump(receiver, rank, stream, display.clone(), closing.clone()))
        });
        let [out, err] = readers;
        let (out, err) = (tokio::spawn(out?), tokio::spawn(err?));
        Ok((close, async move {
            let _both = tokio::join!(out, err);
        }))
    })();
    match followed {
        Ok((close, readers)) => {
            tokio::spawn(follow(rank, child, group.clone(), children, readers, close, events));
            Ok(group)
        }
        Err(error) => {
            group.signal(9);
            // Killed a moment ago: the wait is short and cannot fail for a child that was never waited for.
            let _status = child.wait();
            Err(error).with_context(what)
        }
    }
}

/// Sees a rank to its end: status, last words, the rest of its group, its number.
async fn follow(
    rank: u32,
    mut child: Child,
    group: Group,
    mut children: tokio::signal::unix::Signal,
    readers: impl Future<Output = ()>,
    close: watch::Sender<bool>,
    events: mpsc::Sender<Incoming>,
) {
    tokio::pin!(readers);
    let status = loop {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        match rustix::process::waitid(WaitId::Pid(group.pid), options) {
            Ok(Some(status)) => break status,
            Ok(None) | Err(rustix::io::Errno::INTR) => {
                let _child_changed = children.recv().await;
            }
            Err(error) => panic!("waiting for the process of rank {rank}: {error}"),
        }
    };
    let status = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Status::Code(code),
        (None, Some(number)) => Status::Signal { number, core: status.dumped() },
        (None, None) => panic!("the process of rank {rank} ended neither by itself nor by a signal"),
    };
    let _ending = events.send(Incoming::Exited(rank, status)).await;
    // The process is not reaped yet, so its number cannot have gone to somebody else's group.
    if tokio::time::timeout(LAST_WORDS, &mut readers).await.is_err() {
        group.signal(9);
        if tokio::time::timeout(LEFT_OVERS, &mut readers).await.is_err() {
            close.send_replace(true);
            readers.await;
        }
    }
    group.signal(9);
    group.cleared.store(true, Ordering::Relaxed);
    let _same_status = child.wait();
    let _ending = events.send(Incoming::Gone(rank)).await;
}

/// Reads one stream of a rank to its end, or until it is told that nobody is left to write.
async fn pump(
    mut pipe: pipe::Receiver,
    rank: u32,
    stream: Stream,
    display: Display,
    mut closing: watch::Receiver<bool>,
) {
    let mut splitter = LineSplitter::default();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = tokio::select! {
            biased;
            read = pipe.read(&mut buffer) => read,
            _ = closing.wait_for(|closed| *closed) => break,
        };
        match read {
            Ok(0) | Err(_) => break,
            Ok(count) => {
                if let Some(piece) = splitter.feed(&buffer[..count]) {
                    display.output(rank, stream, piece).await;
                }
            }
        }
    }
    if let Some(piece) = splitter.finish() {
        display.output(rank, stream, piece).await;
    }
}

/// The process that clears away ranks' process groups when this launcher is killed with SIGKILL.
#[derive(Debug)]
pub struct Guard {
    child: Child,
}

impl Guard {
    /// Starts it.
    ///
    /// # Errors
    /// When the system has no process left.
    pub fn start() -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("gpurun").arg(shim::GUARD).process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn().context("cannot start the guard process")? })
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Notes that a group lives (`+`) or is cleared away (`-`).
    pub fn note(&mut self, sign: char, group: &Group) {
        if let Some(pipe) = &mut self.child.stdin {
            // Somebody killed the guard: the job goes on without it.
            let _no_guard = std::io::Write::write_all(pipe, format!("{sign}{}\n", group.number()).as_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _status = self.child.wait();
    }
}

/// This process's children, adopted ones among them. Empty where the kernel does not tell.
pub fn children() -> Vec<Pid> {
    // Children belong to the thread that started or adopted them, and this process has few threads.
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let words = lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    words.filter_map(|word| word.parse().ok().and_then(Pid::from_raw)).collect()
}

/// Takes note of the end of an adopted child, if it has ended.
pub fn reap(pid: Pid) {
    // Still running, or reaped already: both fine.
    let _status = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
}

/// Ends an adopted child, and takes note of it if that took effect at once.
pub fn kill_and_reap(pid: Pid) {
    // It may have ended by itself a moment ago.
    let _ended = rustix::process::kill_process(pid, Signal::KILL);
    reap(pid);
}

/// Lets the next children inherit `file`, until it is dropped.
#[derive(Debug)]
pub struct Inherited<'a>(&'a File);

impl<'a> Inherited<'a> {
    /// From now on.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn new(file: &'a File) -> anyhow::Result<Self> {
        rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty()).context("cannot hand down the shared memory")?;
        Ok(Self(file))
    }
}

impl Drop for Inherited<'_> {
    fn drop(&mut self) {
        // Setting a flag on an open descriptor does not fail.
        let _flag = rustix::io::fcntl_setfd(self.0, rustix::io::FdFlags::CLOEXEC);
    }
}
