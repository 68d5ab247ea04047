//! The launcher at work: events of processes, workers, signals and time go into [`decide`]; what it says is done.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::Context;
use gpurun_wire::{Level, Pages, Store, ToLauncher, ToWorker, Token};
use rustix::process::Pid;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::cli::{Job, Program};
use crate::display::{Display, Stream};
use crate::rank::{Group, Guard, Inherited};
use crate::server::Outgoing;
use crate::supervise::{Action, Cause, Event, Interrupt, Options, State, Status, Verdict, decide};
use crate::{environment, machine, rank, report, server};

/// Time between two looks at the clock.
const TICK: Duration = Duration::from_millis(100);
/// Ticks between two looks at whether processes are stopped.
const LOOK_EVERY: u32 = 5;
/// Events that may wait for supervision.
const QUEUE: usize = 4096;

/// What comes in from the tasks around the supervisor.
#[derive(Debug)]
pub enum Incoming {
    /// A worker has greeted the store.
    Attached(u32, Outgoing),
    /// A worker said something.
    Message(u32, ToLauncher),
    /// A worker's connection carries what is no message.
    Broken(u32, String),
    /// A worker's connection is closed.
    Detached(u32),
    /// A rank's process ended.
    Exited(u32, Status),
    /// Nothing of a rank is left.
    Gone(u32),
}

/// Runs a job to its end and gives the launcher's exit code.
pub fn run(job: &Job) -> u8 {
    match try_run(job) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("gpurun: {error:#}");
            2
        }
    }
}

fn try_run(job: &Job) -> anyhow::Result<u8> {
    // One thread: the parent-death signal of a worker is bound to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let logs = Logs::new(job.log_dir.as_deref())?;
    runtime.block_on(async {
        let (display, thread) = Display::start(job.nproc, logs.path(), job.prefix)?;
        let before = machine::out_of_memory_kills();
        let outcome = run_attempts(job, &display).await;
        let out_of_memory = machine::out_of_memory_kills() > before;
        if let Ok(verdict) = &outcome {
            display.end_progress();
            for line in report::of(verdict, logs.path(), out_of_memory) {
                display.say(Stream::Err, line);
            }
        }
        display.close();
        if thread.join().is_err() {
            eprintln!("gpurun: the display thread panicked; the logs in {} are cut short", logs.path().display());
        }
        let verdict = match outcome {
            Ok(verdict) => verdict,
            Err(error) => {
                // The options were right; the machine did not do its part.
                eprintln!("gpurun: {error:#}");
                return Ok(4);
            }
        };
        logs.keep_if(verdict.exit_code != 0)?;
        Ok(verdict.exit_code)
    })
}

/// The folder of the logs.
enum Logs {
    Chosen(PathBuf),
    Temporary(tempfile::TempDir),
}

impl Logs {
    fn new(chosen: Option<&Path>) -> anyhow::Result<Self> {
        Ok(match chosen {
            Some(path) => Self::Chosen(path.to_owned()),
            None => Self::Temporary(
                tempfile::Builder::new()
                    .prefix("gpurun-")
                    .tempdir()
                    .context("cannot create a temporary folder for the logs; choose one with --log-dir")?,
            ),
        })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Chosen(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }

    fn keep_if(self, keep: bool) -> anyhow::Result<()> {
        match self {
            Self::Temporary(folder) if keep => {
                let _kept = folder.keep();
                Ok(())
            }
            Self::Temporary(folder) => folder.close().context("cannot remove the temporary folder of the logs"),
            Self::Chosen(_) => Ok(()),
        }
    }
}

/// Signals that end the job. One that was ignored when this process started stays ignored: that is how `nohup` and a
/// shell's background jobs ask for it.
struct Signals {
    listening: Vec<(Interrupt, Signal)>,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let ignored = ignored_signals();
        let mut listening = Vec::new();
        for interrupt in [Interrupt::Int, Interrupt::Term, Interrupt::Hup] {
            let number = interrupt.number();
            if ignored & 1 << (number - 1) == 0 {
                let stream = signal(SignalKind::from_raw(number)).context("cannot listen for signals")?;
                listening.push((interrupt, stream));
            }
        }
        Ok(Self { listening })
    }

    async fn next(&mut self) -> Interrupt {
        std::future::poll_fn(|cx| {
            for (interrupt, stream) in &mut self.listening {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*interrupt);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Signal N stands in bit N - 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

async fn run_attempts(job: &Job, display: &Display) -> anyhow::Result<Verdict> {
    let mut signals = Signals::new()?;
    // Processes that a rank leaves behind become this process's children, and are cleared away with the job.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).context("cannot adopt orphans")?;
    let mut guard = Guard::start()?;
    let begin = Instant::now();
    let options =
        Options { world: job.nproc, grace: job.grace, hang_timeout: job.hang_timeout, max_restarts: job.max_restarts };
    let mut state = State::new(options, begin.elapsed());
    loop {
        let attempt = Attempt::start(job, state.attempt(), display, &mut guard)?;
        match attempt.supervise(&mut state, begin, &mut signals, &mut guard).await? {
            End::Done(verdict) => return Ok(verdict),
            End::Restart(cause) => {
                state.restart(begin.elapsed());
                let (now, of) = (state.attempt(), job.max_restarts);
                display.end_progress();
                let line = format!("gpurun: {}; starting again ({now} of {of})", report::describe(&cause));
                display.say(Stream::Err, line);
            }
        }
    }
}

enum End {
    Done(Verdict),
    Restart(Cause),
}

/// One life of all ranks.
struct Attempt {
    display: Display,
    world: u32,
    groups: Vec<Group>,
    stopped: Vec<bool>,
    outgoing: Vec<Option<Outgoing>>,
    store: Store<u32>,
    events: mpsc::Receiver<Incoming>,
    server: tokio::task::JoinHandle<()>,
    positions: Pages,
    shared_memory: Option<File>,
}

impl Attempt {
    fn start(job: &Job, number: u32, display: &Display, guard: &mut Guard) -> anyhow::Result<Self> {
        let world = job.nproc;
        let token = Token::new(environment::random_name()?);
        let name = format!("gpurun-{}", environment::random_name()?);
        let (listener, address) = server::listen(&name).context("cannot open the rendezvous store")?;
        let (master_addr, master_port) = environment::master()?;
        let shared_memory = shared_memory(job)?;
        let positions = Pages::create(world).context("cannot create shared memory")?;
        let rendezvous = environment::Rendezvous {
            address,
            token: token.clone(),
            master_addr,
            master_port,
            shared_memory: shared_memory.as_ref().map(File::as_raw_fd),
            positions: positions.file().as_raw_fd(),
        };
        let hang_timeout = job.hang_timeout.map_or(0.0, |limit| limit.as_secs_f64());
        let (sender, events) = mpsc::channel(QUEUE);
        let mut groups: Vec<Group> = Vec::new();
        let files = shared_memory.iter().chain([positions.file()]);
        let inherited = files.map(Inherited::new).collect::<anyhow::Result<Vec<_>>>()?;
        for rank in 0..world {
            let variables = environment::of_worker(rank, world, number, hang_timeout, &rendezvous);
            match rank::start(rank, job, variables, display, sender.clone()) {
                Ok(group) => {
                    guard.note('+', &group);
                    groups.push(group);
                }
                Err(error) => {
                    groups.iter().for_each(|group| group.signal(9));
                    return Err(error);
                }
            }
        }
        drop(inherited);
        let server = tokio::spawn(server::serve(listener, world, token, sender));
        Ok(Self {
            display: display.clone(),
            world,
            stopped: vec![false; groups.len()],
            outgoing: vec![None; groups.len()],
            groups,
            store: Store::default(),
            events,
            server,
            positions,
            shared_memory,
        })
    }

    async fn supervise(
        mut self,
        state: &mut State,
        begin: Instant,
        signals: &mut Signals,
        guard: &mut Guard,
    ) -> anyhow::Result<End> {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut count = 0u32;
        loop {
            let mut happened = Vec::new();
            tokio::select! {
                biased;
                interrupt = signals.next() => happened.push(Event::Interrupt(interrupt)),
                Some(incoming) = self.events.recv() => self.take(incoming, guard, &mut happened),
                _ = ticks.tick() => {
                    count = count.wrapping_add(1);
                    if count.is_multiple_of(LOOK_EVERY) {
                        happened.extend(self.look_for_stopped());
                        self.orphans(guard).for_each(rank::reap);
                    }
                    for rank in 0..self.world {
                        self.see(rank, &mut happened);
                    }
                    happened.push(Event::Tick);
                }
            }
            for event in happened {
                for action in decide(state, &event, begin.elapsed()) {
                    match action {
                        Action::Done(verdict) => {
                            self.clear_orphans(guard);
                            return Ok(End::Done(verdict));
                        }
                        Action::Restart(cause) => {
                            self.clear_orphans(guard);
                            return Ok(End::Restart(cause));
                        }
                        action => self.act(action),
                    }
                }
            }
        }
    }

    /// Reads where a rank that takes part in the protocol is, or was.
    fn see(&self, rank: u32, happened: &mut Vec<Event>) {
        if self.outgoing[rank as usize].is_some()
            && let Ok((position, progress)) = self.positions.read(rank)
        {
            happened.push(Event::Seen(rank, position, progress));
        }
    }

    /// Handles what concerns the store and the display, and gives supervision its events.
    fn take(&mut self, incoming: Incoming, guard: &mut Guard, happened: &mut Vec<Event>) {
        match incoming {
            Incoming::Attached(rank, outgoing) => {
                self.outgoing[rank as usize] = Some(outgoing);
                happened.push(Event::Attached(rank));
            }
            Incoming::Detached(rank) => self.store.forget(&rank),
            Incoming::Broken(rank, problem) => {
                let line = format!("gpurun: warning: rank {rank} broke the protocol: {problem}");
                self.display.say(Stream::Err, line);
            }
            Incoming::Exited(rank, status) => {
                self.see(rank, happened);
                happened.push(Event::Exited(rank, status));
            }
            Incoming::Gone(rank) => {
                guard.note('-', &self.groups[rank as usize]);
                happened.push(Event::Gone(rank));
            }
            Incoming::Message(rank, message) => happened.extend(self.message(rank, message)),
        }
    }

    fn message(&mut self, rank: u32, message: ToLauncher) -> Option<Event> {
        match message {
            ToLauncher::Hello { .. } => {}
            ToLauncher::Beat { .. } => return Some(Event::Beat(rank)),
            // A rank speaks only for itself.
            ToLauncher::Failure(failure) => return Some(Event::Failed(gpurun_wire::Failure { rank, ..failure })),
            ToLauncher::Step(report) if rank == 0 => self.display.step(report),
            ToLauncher::Step(_) => {}
            ToLauncher::Task { what, done, total } if rank == 0 => self.display.task(what, done, total),
            ToLauncher::Task { .. } => {}
            ToLauncher::Saved { step, dir } if rank == 0 => {
                self.display.say(Stream::Out, format!("checkpoint of step {step}: {dir}"));
            }
            ToLauncher::Saved { .. } => {}
            ToLauncher::Line { level, text } => {
                let who = if rank > 0 { format!("[rank {rank}] ") } else { String::new() };
                match level {
                    Level::Note => self.display.say(Stream::Out, format!("{who}{text}")),
                    Level::Warning => self.display.say(Stream::Err, format!("{who}warning: {text}")),
                }
            }
            ToLauncher::Finished { summary } if rank == 0 => {
                self.display.end_progress();
                if !summary.is_empty() {
                    self.display.say(Stream::Out, summary);
                }
            }
            ToLauncher::Finished { .. } => {}
            ToLauncher::Set { key, value } => match self.store.set(key, value) {
                Ok(answers) => answers.into_iter().for_each(|(reader, answer)| self.tell(reader, answer)),
                Err(error) => self.tell(rank, ToWorker::Abort { reason: error.to_string() }),
            },
            ToLauncher::Get { key, id } => {
                if let Some(answer) = self.store.get(rank, key, id) {
                    self.tell(rank, answer);
                }
            }
        }
        None
    }

    /// Children that this launcher did not start: what ranks left behind, wherever it went.
    fn orphans(&self, guard: &Guard) -> impl Iterator<Item = Pid> {
        let known: Vec<Pid> = self.groups.iter().map(Group::pid).chain([guard.pid()]).collect();
        rank::children().into_iter().filter(move |pid| !known.contains(pid))
    }

    /// All ranks are gone. Killing an orphan may make its children orphans, so it takes a few rounds; a process that the
    /// kernel does not let die is left behind after about a second.
    fn clear_orphans(&self, guard: &Guard) {
        for _ in 0..100 {
            let left: Vec<Pid> = self.orphans(guard).collect();
            if left.is_empty() {
                return;
            }
            left.into_iter().for_each(rank::kill_and_reap);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn look_for_stopped(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for (rank, (group, known)) in (0..).zip(self.groups.iter().zip(&mut self.stopped)) {
            let stopped = group.is_stopped();
            if stopped != *known {
                *known = stopped;
                events.push(Event::Stopped(rank, stopped));
            }
        }
        events
    }

    fn act(&self, action: Action) {
        match action {
            Action::Stop(rank) => self.tell(rank, ToWorker::Stop),
            Action::Abort(rank, reason) => {
                if let Some(memory) = &self.shared_memory {
                    // Makes waits fail even in a rank that has no time to listen; one that does not is told again below.
                    let _told_below = gpurun_comm::abort_shared_memory(memory, &reason);
                }
                self.tell(rank, ToWorker::Abort { reason });
            }
            Action::Signal(rank, number) => self.groups[rank as usize].signal(number),
            Action::Kill(rank) => self.groups[rank as usize].signal(9),
            Action::Done(_) | Action::Restart(_) => unreachable!("ends the loop"),
        }
    }

    fn tell(&self, rank: u32, message: ToWorker) {
        if let Some(outgoing) = &self.outgoing[rank as usize] {
            // A worker that is gone needs no message.
            let _gone = outgoing.send(message);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.server.abort();
        // After a regular end all groups are cleared away, and this does nothing.
        self.groups.iter().for_each(|group| group.signal(9));
    }
}

/// Memory for the ranks' communicators. Other programs may be more ranks than it serves, and have no use for it then.
fn shared_memory(job: &Job) -> anyhow::Result<Option<File>> {
    match gpurun_comm::create_shared_memory(job.nproc) {
        Ok(memory) => Ok(Some(memory.into())),
        Err(error) if error.kind() == ErrorKind::InvalidInput && matches!(job.program, Program::Other(_)) => Ok(None),
        Err(error) => Err(error).context("cannot create shared memory for the ranks"),
    }
}
