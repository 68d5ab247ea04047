//! What tests share: a time limit that names the test.
#![forbid(unsafe_code)]

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Ends the process with a message when it is not dropped in time.
pub struct TimeLimit {
    _done: Sender<()>,
}

/// Gives the current test `seconds` to finish. Hold the guard to the end of the test:
/// `let _limit = testkit::time_limit(30);`
#[must_use]
pub fn time_limit(seconds: u64) -> TimeLimit {
    let (done, watched) = channel::<()>();
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
            // Not `eprintln`, whose output the test harness holds back and an abort would lose.
            let _ = writeln!(std::io::stderr(), "test {name} ran past its limit of {seconds} s");
            std::process::abort();
        }
    });
    TimeLimit { _done: done }
}
