//! The launcher's end of the store: greets workers, reads their messages, writes to them.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::time::Duration;

use gpurun_wire::{Address, Admission, FrameReader, ToLauncher, ToWorker, Token, admit, frame};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use crate::run::Incoming;

/// Time that a connection has for its greeting.
const GREETING: Duration = Duration::from_secs(10);
/// Time between two beats of a worker.
const BEAT: Duration = Duration::from_millis(250);

/// Messages on their way to a worker.
pub type Outgoing = mpsc::UnboundedSender<ToWorker>;

/// A listening socket without a file, and its address.
///
/// # Errors
/// When the system has no socket left.
pub fn listen(name: &str) -> io::Result<(UnixListener, Address)> {
    let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok((UnixListener::from_std(listener)?, Address::Abstract(name.to_owned())))
}

/// Accepts connections until it is dropped.
pub async fn serve(listener: UnixListener, world: u32, token: Token, events: mpsc::Sender<Incoming>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if is_ours(&stream) => {
                tokio::spawn(converse(stream, world, token.clone(), events.clone()));
            }
            Ok(_) => {}
            // Out of descriptors, or a caller that hung up: try again, without spinning.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Only processes of this user may speak, whatever they know.
fn is_ours(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}

async fn converse(stream: UnixStream, world: u32, token: Token, events: mpsc::Sender<Incoming>) {
    let (mut reader, mut writer) = stream.into_split();
    let mut frames = FrameReader::new();
    let greeting = tokio::time::timeout(GREETING, next(&mut reader, &mut frames)).await;
    let verdict = match greeting {
        Ok(Ok(Some(first))) => admit(&first, world, &token),
        Ok(Ok(None)) | Err(_) => return,
        Ok(Err(problem)) => Admission::Refused(problem),
    };
    let rank = match verdict {
        Admission::Rank { rank, .. } => rank,
        Admission::Refused(reason) => {
            // The worker reports the refusal; if it is gone there is nobody to tell.
            let _gone = write(&mut writer, &ToWorker::Refused { reason }).await;
            return;
        }
    };
    if write(&mut writer, &ToWorker::Welcome { beat_millis: BEAT.as_millis() as u32 }).await.is_err() {
        return;
    }
    let (outgoing, messages) = mpsc::unbounded_channel();
    tokio::spawn(write_all(writer, messages));
    if events.send(Incoming::Attached(rank, outgoing)).await.is_err() {
        return;
    }
    loop {
        match next(&mut reader, &mut frames).await {
            Ok(Some(message)) => {
                if events.send(Incoming::Message(rank, message)).await.is_err() {
                    return;
                }
            }
            Ok(None) => break,
            Err(problem) => {
                let _ending = events.send(Incoming::Broken(rank, problem)).await;
                break;
            }
        }
    }
    let _ending = events.send(Incoming::Detached(rank)).await;
}

async fn next(reader: &mut OwnedReadHalf, frames: &mut FrameReader) -> Result<Option<ToLauncher>, String> {
    let mut buffer = [0; 16 << 10];
    loop {
        if let Some(message) = frames.next_message().map_err(|error| error.to_string())? {
            return Ok(Some(message));
        }
        match reader.read(&mut buffer).await {
            // A reset is how the death of a worker looks from here; its exit status tells more.
            Ok(0) | Err(_) => return Ok(None),
            Ok(count) => frames.feed(&buffer[..count]),
        }
    }
}

async fn write(writer: &mut OwnedWriteHalf, message: &ToWorker) -> io::Result<()> {
    let bytes = frame(message).map_err(io::Error::other)?;
    writer.write_all(&bytes).await
}

async fn write_all(mut writer: OwnedWriteHalf, mut messages: mpsc::UnboundedReceiver<ToWorker>) {
    while let Some(message) = messages.recv().await {
        if write(&mut writer, &message).await.is_err() {
            return;
        }
    }
}
