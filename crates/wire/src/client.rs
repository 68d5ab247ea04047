//! The worker's side of a connection: blocking, with one thread that listens and one that beats.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::address::{Address, Stream};
use crate::codec::CodecError;
use crate::frame::{FrameError, FrameReader, frame};
use crate::message::{Position, ToLauncher, ToWorker};

/// What went wrong between a worker and its store.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("cannot reach the rendezvous store at {address}: {source}")]
    Connect {
        /// Where.
        address: Address,
        /// What the system said.
        source: io::Error,
    },
    /// The store does not know this worker.
    #[error("the rendezvous store at {address} refuses this worker: {reason}")]
    Refused {
        /// Where.
        address: Address,
        /// Why.
        reason: String,
    },
    /// The connection broke.
    #[error("the connection to the rendezvous store broke: {0}")]
    Lost(String),
    /// The job is being aborted.
    #[error("the job was aborted: {0}")]
    Aborted(String),
    /// A key was not set in time.
    #[error("key {key} was not set in the rendezvous store within {after:?}")]
    Timeout {
        /// The key.
        key: String,
        /// How long was waited.
        after: Duration,
    },
    /// The stream is not of this protocol.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A message is too large.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// One sign of life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beat {
    /// Where the worker is.
    pub position: Position,
    /// Grows whenever the worker gets on.
    pub progress: u64,
}

/// What a worker wants to be told, and what it tells.
pub struct Hooks {
    /// Asked for each beat, on the beating thread.
    pub beat: Box<dyn Fn() -> Beat + Send>,
    /// Called once, on the listening thread, when the job is aborted or the store is gone.
    pub aborted: Box<dyn Fn(&str) + Send>,
}

#[derive(Default)]
struct State {
    stop: bool,
    abort: Option<String>,
    lost: Option<String>,
    closing: bool,
    values: HashMap<u32, Vec<u8>>,
    next_id: u32,
}

struct Shared {
    writer: Mutex<Stream>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A plain value behind a lock stays whole when a holder panics, so poisoning is no reason to fail.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn send(&self, message: &ToLauncher) -> Result<(), ClientError> {
        let bytes = frame(message)?;
        lock(&self.writer).write_all(&bytes).map_err(|error| ClientError::Lost(error.to_string()))
    }
}

/// A connection to the launcher, or to the rank that serves the store when there is no launcher.
pub struct StoreClient {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl StoreClient {
    /// Connects, greets, and starts to listen and to beat. `hello` is [`ToLauncher::Hello`].
    ///
    /// # Errors
    /// When nobody listens at `address`, or the greeting is refused, within `timeout`.
    pub fn connect(
        address: &Address,
        hello: &ToLauncher,
        timeout: Duration,
        hooks: Hooks,
    ) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { address: address.clone(), source };
        let mut stream = address.connect(timeout).map_err(failed)?;
        stream.set_read_timeout(Some(timeout)).map_err(failed)?;
        stream.write_all(&frame(hello)?).map_err(failed)?;
        let mut frames = FrameReader::new();
        let beat_millis = match read_message(&mut stream, &mut frames)? {
            ToWorker::Welcome { beat_millis } => beat_millis,
            ToWorker::Refused { reason } => return Err(ClientError::Refused { address: address.clone(), reason }),
            other => return Err(ClientError::Lost(format!("expected a welcome, got {other:?}"))),
        };
        stream.set_read_timeout(None).map_err(failed)?;
        let writer = Mutex::new(stream.try_clone().map_err(failed)?);
        let shared = Arc::new(Shared { writer, state: Mutex::default(), changed: Condvar::new() });
        let Hooks { beat, aborted } = hooks;
        let (listening, beating) = (shared.clone(), shared.clone());
        let interval = Duration::from_millis(u64::from(beat_millis));
        let threads = vec![
            spawn("store-listen", move || listen(&listening, stream, frames, &*aborted)).map_err(failed)?,
            spawn("store-beat", move || beat_on(&beating, interval, &*beat)).map_err(failed)?,
        ];
        Ok(Self { shared, threads })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// When the connection broke or the message is too large.
    pub fn send(&self, message: &ToLauncher) -> Result<(), ClientError> {
        self.shared.send(message)
    }

    /// Sets a key.
    ///
    /// # Errors
    /// As [`StoreClient::send`].
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), ClientError> {
        self.send(&ToLauncher::Set { key: key.to_owned(), value: value.to_owned() })
    }

    /// The value of a key, as soon as any worker has set it.
    ///
    /// # Errors
    /// When that takes longer than `timeout`, the job is aborted, or the connection broke.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, ClientError> {
        let deadline = Instant::now() + timeout;
        let id = {
            let mut state = lock(&self.shared.state);
            state.next_id = state.next_id.wrapping_add(1);
            state.next_id
        };
        self.send(&ToLauncher::Get { key: key.to_owned(), id })?;
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(value) = state.values.remove(&id) {
                return Ok(value);
            }
            if let Some(reason) = &state.abort {
                return Err(ClientError::Aborted(reason.clone()));
            }
            if let Some(reason) = &state.lost {
                return Err(ClientError::Lost(reason.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ClientError::Timeout { key: key.to_owned(), after: timeout });
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// True once the launcher has asked to end at the next step boundary.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        lock(&self.shared.state).stop
    }

    /// Why the job is being aborted, once it is.
    #[must_use]
    pub fn aborted(&self) -> Option<String> {
        let state = lock(&self.shared.state);
        state.abort.clone().or_else(|| state.lost.clone())
    }
}

impl Drop for StoreClient {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.changed.notify_all();
        lock(&self.shared.writer).shutdown();
        for thread in self.threads.drain(..) {
            // A hook that panicked has said so on stderr already. A hook may hold the last handle of this client: then
            // this is that thread, which cannot join itself.
            if thread.thread().id() != std::thread::current().id() {
                let _panicked = thread.join();
            }
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

fn read_message(stream: &mut Stream, frames: &mut FrameReader) -> Result<ToWorker, ClientError> {
    let mut buffer = [0; 16 << 10];
    loop {
        if let Some(message) = frames.next_message()? {
            return Ok(message);
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err(ClientError::Lost("the store closed it".to_owned())),
            Ok(count) => frames.feed(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ClientError::Lost(error.to_string())),
        }
    }
}

fn listen(shared: &Shared, mut stream: Stream, mut frames: FrameReader, aborted: &dyn Fn(&str)) {
    loop {
        let message = read_message(&mut stream, &mut frames);
        let mut state = lock(&shared.state);
        match message {
            Ok(ToWorker::Value { id, value }) => {
                state.values.insert(id, value);
            }
            Ok(ToWorker::Stop) => state.stop = true,
            Ok(ToWorker::Abort { reason }) => {
                let first = state.abort.is_none();
                state.abort = Some(reason.clone());
                drop(state);
                shared.changed.notify_all();
                if first {
                    aborted(&reason);
                }
                continue;
            }
            Ok(ToWorker::Welcome { .. } | ToWorker::Refused { .. }) => {}
            Err(error) => {
                let reason = error.to_string();
                state.lost = Some(reason.clone());
                let tell = state.abort.is_none() && !state.closing;
                drop(state);
                shared.changed.notify_all();
                if tell {
                    aborted(&reason);
                }
                return;
            }
        }
        drop(state);
        shared.changed.notify_all();
    }
}

fn beat_on(shared: &Shared, interval: Duration, beat: &dyn Fn() -> Beat) {
    loop {
        let Beat { position, progress } = beat();
        if shared.send(&ToLauncher::Beat { position, progress }).is_err() {
            // The listener sees the broken connection too, and tells the worker.
            return;
        }
        let deadline = Instant::now() + interval;
        let mut state = lock(&shared.state);
        loop {
            if state.closing || state.lost.is_some() {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
