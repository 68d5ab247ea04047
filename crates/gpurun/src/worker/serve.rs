//! The rendezvous store on rank 0, for jobs that no launcher started: the same protocol, one thread a connection.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpurun_wire::{Address, Admission, FrameReader, Store, Stream, ToLauncher, ToWorker, Token, admit, frame};

/// Milliseconds between beats. Nobody watches them here; they keep a connection through a firewall alive.
const BEAT_MILLIS: u32 = 10_000;
/// Time that a connection has for its greeting.
const GREETING: Duration = Duration::from_secs(10);

/// The running server. Rank 0 holds it to its end.
pub(super) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    world: u32,
    token: Token,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    store: Store<u32>,
    /// The writing ends, by rank.
    writers: BTreeMap<u32, Stream>,
    /// Ranks that said that they are done.
    finished: Vec<u32>,
    /// Why the job is given up, once it is.
    abort: Option<String>,
}

impl Server {
    /// Listens at `address`.
    ///
    /// # Errors
    /// When the address is taken or is not this machine's.
    pub(super) fn start(address: &Address, world: u32, token: Token) -> io::Result<Self> {
        let shared = Arc::new(Shared { world, token, state: Mutex::default(), changed: Condvar::new() });
        let serving = shared.clone();
        let accept: Box<dyn FnMut() -> io::Result<Stream> + Send> = match address {
            Address::Abstract(name) => {
                let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
                Box::new(move || listener.accept().and_then(|(stream, _)| unix(stream)))
            }
            Address::Tcp(host_port) => {
                let listener = TcpListener::bind(host_port)?;
                Box::new(move || listener.accept().and_then(|(stream, _)| tcp(stream)))
            }
        };
        // The thread ends with the process: a listener cannot be waited for and woken without more machinery than that.
        std::thread::Builder::new().name("store-serve".to_owned()).spawn(move || serve(&serving, accept))?;
        Ok(Self { shared })
    }

    /// Waits until every other rank is done or gone, at most `limit`: rank 0 ends last, for its end closes the store.
    pub(super) fn wait_for_others(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.lock();
        while state.writers.keys().any(|rank| *rank != 0 && !state.finished.contains(rank)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Only processes of this user may speak, whatever they know.
fn unix(stream: UnixStream) -> io::Result<Stream> {
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(Stream::Unix(stream))
}

fn tcp(stream: TcpStream) -> io::Result<Stream> {
    stream.set_nodelay(true)?;
    Ok(Stream::Tcp(stream))
}

impl Shared {
    /// Plain values stay whole when a holder panics.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(shared: &Arc<Shared>, mut accept: Box<dyn FnMut() -> io::Result<Stream> + Send>) {
    loop {
        match accept() {
            Ok(stream) => {
                let shared = shared.clone();
                let converse = move || converse(&shared, stream);
                // Without a thread for it the caller gets no answer, and says so after its deadline.
                let _no_thread = std::thread::Builder::new().name("store-talk".to_owned()).spawn(converse);
            }
            // Out of descriptors, or a caller that hung up: go on, without spinning.
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn converse(shared: &Shared, mut stream: Stream) {
    let mut frames = FrameReader::new();
    let Ok(mut writer) = stream.try_clone() else { return };
    if stream.set_read_timeout(Some(GREETING)).is_err() {
        return;
    }
    let verdict = match next(&mut stream, &mut frames) {
        Ok(Some(first)) => admit(&first, shared.world, &shared.token),
        Ok(None) => return,
        Err(problem) => Admission::Refused(problem),
    };
    let rank = match verdict {
        Admission::Rank { rank, .. } => rank,
        Admission::Refused(reason) => {
            send(&mut writer, &ToWorker::Refused { reason });
            return;
        }
    };
    send(&mut writer, &ToWorker::Welcome { beat_millis: BEAT_MILLIS });
    if stream.set_read_timeout(None).is_err() {
        return;
    }
    {
        let mut state = shared.lock();
        if let Some(reason) = state.abort.clone() {
            send(&mut writer, &ToWorker::Abort { reason });
        }
        state.writers.insert(rank, writer);
    }
    while let Ok(Some(message)) = next(&mut stream, &mut frames) {
        take(&mut shared.lock(), rank, message);
        shared.changed.notify_all();
    }
    let mut state = shared.lock();
    state.writers.remove(&rank);
    state.store.forget(&rank);
    if !state.finished.contains(&rank) {
        abort(&mut state, &format!("rank {rank} is gone"));
    }
    shared.changed.notify_all();
}

fn take(state: &mut State, rank: u32, message: ToLauncher) {
    match message {
        ToLauncher::Set { key, value } => match state.store.set(key, value) {
            Ok(answers) => {
                for (reader, answer) in answers {
                    tell(state, reader, &answer);
                }
            }
            Err(error) => abort(state, &error.to_string()),
        },
        ToLauncher::Get { key, id } => {
            if let Some(answer) = state.store.get(rank, key, id) {
                tell(state, rank, &answer);
            }
        }
        ToLauncher::Failure(failure) if !failure.secondary => {
            abort(state, &format!("rank {rank} failed {}: {}", failure.position, failure.message));
        }
        ToLauncher::Finished { .. } => state.finished.push(rank),
        // A launcher would show these; rank 0 prints its own.
        _ => {}
    }
}

fn abort(state: &mut State, reason: &str) {
    if state.abort.is_none() {
        state.abort = Some(reason.to_owned());
        for writer in state.writers.values_mut() {
            send(writer, &ToWorker::Abort { reason: reason.to_owned() });
        }
    }
}

fn tell(state: &mut State, rank: u32, message: &ToWorker) {
    if let Some(writer) = state.writers.get_mut(&rank) {
        send(writer, message);
    }
}

/// A rank that cannot be written to is gone, which its own thread notices.
fn send(writer: &mut Stream, message: &ToWorker) {
    let _gone = frame(message).map_err(io::Error::other).and_then(|bytes| writer.write_all(&bytes));
}

fn next(stream: &mut Stream, frames: &mut FrameReader) -> Result<Option<ToLauncher>, String> {
    let mut buffer = [0; 16 << 10];
    loop {
        if let Some(message) = frames.next_message().map_err(|error| error.to_string())? {
            return Ok(Some(message));
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return Ok(None),
            Ok(count) => frames.feed(&buffer[..count]),
        }
    }
}
