//! The worker's side of a job: which rank it is, how it meets the others, and what it tells the launcher.
//!
//! A program calls [`Worker::from_env`] and then [`Worker::run`]. Under the `gpurun` launcher, the launcher serves the
//! store, shows what is reported, and expects progress: a rank whose [`Reporter`] says nothing for the hang timeout (five times
//! that before its first step) counts as hung. Under Slurm, Open MPI, a Kubernetes training job, or anything that sets `RANK` and
//! `WORLD_SIZE`, rank 0 serves the store and prints. With neither, the process is the only rank.

mod place;
pub mod progress;
mod reporter;
mod serve;

use std::any::Any;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpurun_wire::{Address, ClientError, FailureKind, Hooks, Slot, StoreClient, ToLauncher, Token};

pub use gpurun_wire::{Level, Phase, Position, StepReport};
pub use place::{Place, PlaceError, Starter};
pub use reporter::Reporter;

use progress::{LINE_EVERY, TaskProgress};
use reporter::{Inner, Track};
use serve::Server;

/// Time for a launcher on this machine to answer.
const LAUNCHER_ANSWERS: Duration = Duration::from_secs(30);
/// Time for all ranks to be started, when a job manager starts them.
const RANKS_APPEAR: Duration = Duration::from_secs(300);
/// Pause between two attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Time that rank 0 waits for the others at its end, when it serves the store.
const OTHERS_END: Duration = Duration::from_secs(30);
/// Time from an abort to the end of a process that no launcher would kill.
const ABORT_LASTS: Duration = Duration::from_secs(10);
/// Least time between two reports of a task to a launcher, which shows a bar.
const TASK_EVERY: Duration = Duration::from_millis(100);
/// Key of the shared memory, where no launcher hands it down.
const MEMORY_KEY: &str = "gpurun/shared-memory";

/// Why a worker could not take its place.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The environment does not say which rank this is.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The store cannot be reached or refuses this worker.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Rank 0 cannot serve the store.
    #[error("rank 0 cannot serve the rendezvous store at {address}: {source}")]
    Serve {
        /// Where.
        address: Address,
        /// What the system said.
        source: io::Error,
    },
    /// The shared memory of the job cannot be opened.
    #[error("cannot open the shared memory of the job ({what}): {source}; all ranks must run on one machine")]
    Memory {
        /// Which.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A variable holds what it should not.
    #[error("{name}={value}: {problem}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// How a worker's work failed, in the terms of the launcher.
#[derive(Clone, Debug)]
pub struct WorkFailure {
    /// What happened.
    pub message: String,
    /// The process's exit code: 2 usage, configuration or input; 3 does not fit; 4 failed; 5 no usable checkpoint; 6 a
    /// wait for another rank ran out; 7 non-finite for too long.
    pub exit_code: u8,
    /// This rank only noticed that another one failed.
    pub secondary: bool,
}

type AbortHook = Box<dyn Fn(&str) + Send>;

/// Whether the job is given up, and who wants to know.
#[derive(Default)]
struct AbortState {
    reason: Option<String>,
    hook: Option<AbortHook>,
    /// Every wait of a communicator over it fails from then on.
    memory: Option<File>,
}

impl AbortState {
    fn abort_memory(&self) {
        if let (Some(reason), Some(memory)) = (&self.reason, &self.memory)
            && let Err(error) = gpurun_comm::abort_shared_memory(memory, reason)
        {
            eprintln!("gpurun: cannot abort the communicators: {error}");
        }
    }
}

/// One rank of a job.
pub struct Worker {
    place: Place,
    reporter: Reporter,
    memory: Option<File>,
    abort: Arc<Mutex<AbortState>>,
    server: Option<Server>,
    restart: u32,
    threads: usize,
    hang_timeout: Option<Duration>,
}

impl Worker {
    /// Takes the place that the environment gives: connects to the store, and opens the shared memory.
    ///
    /// # Errors
    /// When variables contradict each other, the store cannot be reached, or the memory cannot be opened.
    pub fn from_env() -> Result<Self, WorkerError> {
        let place = Place::from_env()?;
        let restart = variable("GPURUN_RESTART", "not a whole number")?.unwrap_or(0);
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let threads: Option<usize> = variable("GPURUN_THREADS", "not a whole number")?;
        if threads == Some(0) {
            let (name, value) = ("GPURUN_THREADS", "0".to_owned());
            return Err(WorkerError::Variable { name, value, problem: "a worker has at least one thread" });
        }
        let threads = threads.unwrap_or((available / place.local_world.max(1) as usize).max(1));
        let hang_seconds: f64 = variable("GPURUN_HANG_TIMEOUT", "not a number of seconds")?.unwrap_or(60.0);
        let hang_timeout = Duration::try_from_secs_f64(hang_seconds).ok().filter(|limit| !limit.is_zero());
        let track = Arc::new(match &place.starter {
            Starter::Launcher { .. } => Track::on(inherited_slot(place.rank)?),
            _ => Track::default(),
        });
        let abort: Arc<Mutex<AbortState>> = Arc::default();
        let mut server = None;
        let mut memory = None;
        let client = match &place.starter {
            Starter::Nobody => None,
            Starter::Launcher { store, token } => {
                let client = connect(&place, store, token, LAUNCHER_ANSWERS, hooks(&track, &abort, false))?;
                memory = Some(inherited("GPURUN_SHM_FD")?);
                Some(client)
            }
            Starter::JobManager { store, token, .. } => {
                if place.rank == 0 {
                    let failed = |source| WorkerError::Serve { address: store.clone(), source };
                    server = Some(Server::start(store, place.world, token.clone()).map_err(failed)?);
                }
                wait_for_rank_0(store)?;
                let client = connect(&place, store, token, LAUNCHER_ANSWERS, hooks(&track, &abort, true))?;
                memory = Some(exchanged_memory(&client, &place)?);
                Some(client)
            }
        };
        if let Some(memory) = &memory {
            let failed = |source| WorkerError::Memory { what: "a second handle".to_owned(), source };
            let mut state = abort.lock().unwrap_or_else(PoisonError::into_inner);
            state.memory = Some(memory.try_clone().map_err(failed)?);
            state.abort_memory();
        }
        let launched = matches!(place.starter, Starter::Launcher { .. });
        let inner = Inner {
            rank: place.rank,
            track,
            client: client.map(Arc::new),
            launched,
            stop_signal: Arc::default(),
            plain: Mutex::default(),
            tasks: Mutex::new(TaskProgress::new(if launched { TASK_EVERY } else { LINE_EVERY })),
        };
        let reporter = Reporter { inner: Arc::new(inner) };
        Ok(Self { place, reporter, memory, abort, server, restart, threads, hang_timeout })
    }

    /// Index of this rank.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.place.rank
    }

    /// Number of ranks.
    #[must_use]
    pub const fn world(&self) -> u32 {
        self.place.world
    }

    /// Rank, world, and who started them.
    #[must_use]
    pub const fn place(&self) -> &Place {
        &self.place
    }

    /// The memory that all ranks share, for [`gpurun_comm::Fabric::process`]. `None` for a single rank that nobody started.
    #[must_use]
    pub const fn shared_memory(&self) -> Option<&File> {
        self.memory.as_ref()
    }

    /// How often the job has been started again after a failure.
    #[must_use]
    pub const fn restart(&self) -> u32 {
        self.restart
    }

    /// Threads that this rank's CPU work may use: `GPURUN_THREADS`, or an equal share of the machine.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.threads
    }

    /// How long a wait for another rank may last; `None` for ever. The launcher finds a hung rank after this time, so a
    /// communicator's own deadline should be longer.
    #[must_use]
    pub const fn hang_timeout(&self) -> Option<Duration> {
        self.hang_timeout
    }

    /// To tell what this rank does.
    #[must_use]
    pub const fn reporter(&self) -> &Reporter {
        &self.reporter
    }

    /// Calls `hook` once with the reason when the job is given up; at once if it is already. Waits of communicators over
    /// [`Worker::shared_memory`] fail then in any case; the hook is for other waits, and returns soon.
    pub fn on_abort(&self, hook: impl Fn(&str) + Send + 'static) {
        let mut state = self.abort.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.reason {
            Some(reason) => hook(reason),
            None => state.hook = Some(Box::new(hook)),
        }
    }

    /// Sets a key of the store.
    ///
    /// # Errors
    /// When the store is gone. A single rank that nobody started has no store: then nothing happens.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), WorkerError> {
        match &self.reporter.inner.client {
            Some(client) => Ok(client.set(key, value)?),
            None => Ok(()),
        }
    }

    /// The value of a key, as soon as any rank has set it. `None` for a single rank that nobody started.
    ///
    /// # Errors
    /// When that takes longer than `timeout`, the job is given up, or the store is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, WorkerError> {
        let client = self.reporter.inner.client.as_ref();
        Ok(client.map(|client| client.get(key, timeout)).transpose()?)
    }

    /// Does the work of this rank, and gives the process's exit code. What the work returns is the summary for the user
    /// (rank 0's is shown). An error or a panic reaches the launcher with rank, step and instruction.
    pub fn run(self, work: impl FnOnce(&Self) -> Result<String, WorkFailure>) -> u8 {
        let panics = PanicNotes::install();
        if !self.reporter.inner.launched {
            stop_on_signals(&self.reporter.inner.stop_signal);
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&self)));
        let code = match outcome {
            Ok(Ok(summary)) => {
                self.reporter.finished(&summary);
                match self.reporter.inner.stop_signal.load(Ordering::Relaxed) {
                    0 => 0,
                    signal => 128 + signal as u8,
                }
            }
            Ok(Err(WorkFailure { message, exit_code, secondary })) => {
                let kind = if exit_code == 6 && !secondary { FailureKind::Timeout } else { FailureKind::Error };
                self.reporter.failed(kind, &message, exit_code, secondary);
                exit_code
            }
            Err(payload) => {
                self.reporter.failed(FailureKind::Panic, &panics.describe(&*payload), 4, false);
                4
            }
        };
        let Self { reporter, server, .. } = self;
        drop(reporter);
        if let Some(server) = server {
            server.wait_for_others(OTHERS_END);
        }
        code
    }
}

/// A variable as a value, if it is set.
fn variable<T: std::str::FromStr>(name: &'static str, problem: &'static str) -> Result<Option<T>, WorkerError> {
    let Ok(value) = std::env::var(name) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| WorkerError::Variable { name, value, problem })
}

fn connect(
    place: &Place,
    store: &Address,
    token: &Token,
    timeout: Duration,
    hooks: Hooks,
) -> Result<StoreClient, ClientError> {
    let (rank, world, token) = (place.rank, place.world, token.clone());
    let hello = ToLauncher::Hello { rank, world, token, pid: std::process::id() };
    StoreClient::connect(store, &hello, timeout, hooks)
}

fn hooks(track: &Arc<Track>, abort: &Arc<Mutex<AbortState>>, alone: bool) -> Hooks {
    let (track, abort) = (track.clone(), abort.clone());
    let aborted = move |reason: &str| {
        let mut state = abort.lock().unwrap_or_else(PoisonError::into_inner);
        state.reason = Some(reason.to_owned());
        state.abort_memory();
        if let Some(hook) = state.hook.take() {
            hook(reason);
        }
        drop(state);
        if alone {
            end_later(reason.to_owned());
        }
    };
    Hooks { beat: Box::new(move || track.beat()), aborted: Box::new(aborted) }
}

/// Where no launcher would, ends this process if its work does not notice the abort.
fn end_later(reason: String) {
    let end = move || {
        std::thread::sleep(ABORT_LASTS);
        eprintln!("gpurun: this rank did not end by itself after: {reason}");
        std::process::exit(4);
    };
    // Without a thread for it, ending now is better than never.
    if std::thread::Builder::new().name("abort".to_owned()).spawn(end).is_err() {
        std::process::exit(4);
    }
}

/// Tries to reach rank 0 until it listens: job managers start ranks in any order.
fn wait_for_rank_0(store: &Address) -> Result<(), WorkerError> {
    let deadline = Instant::now() + RANKS_APPEAR;
    loop {
        match store.connect(Duration::from_secs(5)) {
            // A connection that greets nobody is closed without a word.
            Ok(_stream) => return Ok(()),
            Err(source) if Instant::now() >= deadline => {
                return Err(ClientError::Connect { address: store.clone(), source }.into());
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Memory that the launcher handed down. It is opened anew by way of `/proc`, which gives an owned descriptor. A program in
/// between may have closed what it inherited (Python's `subprocess` does): then the launcher's own descriptor serves.
fn inherited(name: &'static str) -> Result<File, WorkerError> {
    let number: Option<u32> = variable(name, "not a file descriptor")?;
    let launcher: Option<u32> = variable("GPURUN_LAUNCHER", "not a process")?;
    let Some(number) = number else {
        return Err(WorkerError::Memory { what: format!("{name} is not set"), source: io::ErrorKind::NotFound.into() });
    };
    let is_memory = |path: &str| {
        std::fs::read_link(path).is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"/memfd:gpurun"))
    };
    let own = format!("/proc/self/fd/{number}");
    let path = match launcher {
        Some(launcher) if !is_memory(&own) => format!("/proc/{launcher}/fd/{number}"),
        _ => own,
    };
    open_memory(&path).map_err(|source| WorkerError::Memory { what: format!("{name}={number}"), source })
}

fn inherited_slot(rank: u32) -> Result<Slot, WorkerError> {
    let file = inherited("GPURUN_POSITIONS_FD")?;
    Slot::map(&file, rank).map_err(|source| WorkerError::Memory { what: "GPURUN_POSITIONS_FD".to_owned(), source })
}

fn open_memory(path: &str) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Rank 0 makes the memory, and the others open it through rank 0's process.
fn exchanged_memory(client: &StoreClient, place: &Place) -> Result<File, WorkerError> {
    if place.rank == 0 {
        let failed = |source| WorkerError::Memory { what: "creating it".to_owned(), source };
        let memory = File::from(gpurun_comm::create_shared_memory(place.world).map_err(failed)?);
        let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&memory));
        client.set(MEMORY_KEY, path.as_bytes())?;
        return Ok(memory);
    }
    let path = String::from_utf8_lossy(&client.get(MEMORY_KEY, RANKS_APPEAR)?).into_owned();
    open_memory(&path).map_err(|source| WorkerError::Memory { what: path, source })
}

/// SIGINT and SIGTERM ask for a stop at the next step boundary; a second one ends the process at once.
fn stop_on_signals(stop: &Arc<AtomicUsize>) {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let again = Arc::new(std::sync::atomic::AtomicBool::new(false));
        // The order matters: the flag that the first line reads is set by the last one. Registering fails only for
        // signals that cannot be caught.
        let registered = signal_hook::flag::register_conditional_default(signal, again.clone())
            .and_then(|_| signal_hook::flag::register_usize(signal, stop.clone(), signal as usize))
            .and_then(|_| signal_hook::flag::register(signal, again));
        registered.expect("SIGINT and SIGTERM can be caught");
    }
}

/// Where the last panic was, which its payload does not say.
#[derive(Clone, Default)]
struct PanicNotes(Arc<Mutex<Option<(String, String)>>>);

impl PanicNotes {
    /// Keeps notes of panics, before whatever else is done with them. A panic may be caught and turned into an error, so
    /// it is reported only when it ends the work.
    fn install() -> Self {
        let notes = Self::default();
        let kept = notes.clone();
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let place = info.location().map(ToString::to_string).unwrap_or_default();
            *kept.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((text_of(info.payload()), place));
            before(info);
        }));
        notes
    }

    fn describe(&self, payload: &(dyn Any + Send)) -> String {
        let message = text_of(payload);
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((text, place)) if *text == message => format!("{message} (at {place})"),
            _ => message,
        }
    }
}

fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without words".to_owned())
}
