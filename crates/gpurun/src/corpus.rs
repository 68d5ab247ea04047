//! The text that a run trains on when it is given none: this project's own sources and documents.

/// Name and contents of each document.
pub const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/corpus.rs"));
