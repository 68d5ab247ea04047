//! What launcher and workers say to each other: messages, frames, the rendezvous store, and a blocking client.
//!
//! A connection carries frames in both directions. The worker speaks first ([`ToLauncher::Hello`]), the launcher answers
//! [`ToWorker::Welcome`] or [`ToWorker::Refused`], then both say what they have to say at any time. Everything but
//! [`StoreClient`] is free of I/O, so that an asynchronous launcher and blocking workers share it.
#![deny(unsafe_code)]

mod address;
mod client;
mod codec;
mod frame;
mod message;
mod page;
mod store;

pub use address::{Address, AddressError, Stream};
pub use client::{Beat, ClientError, Hooks, StoreClient};
pub use codec::{CodecError, decode, encode};
pub use frame::{FrameError, FrameReader, MAX_FRAME, VERSION, frame};
pub use message::{Failure, FailureKind, Level, Phase, Position, StepReport, ToLauncher, ToWorker, Token};
pub use page::{Pages, Slot};
pub use store::{Admission, Store, StoreError, admit};
