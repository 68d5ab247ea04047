//! Text, JSON Lines and token shards to packed sequences, in an order that is a pure function of the seed.
//!
//! Memory does not grow with the data: text is tokenised once into a cached file, which is mapped.
#![deny(unsafe_code)]

mod dataset;
mod error;
mod locate;
mod order;
mod shard;
mod source;
mod tokenizer;

pub use dataset::{DataConfig, Dataset, Progress};
pub use error::DataError;
pub use shard::write_bin;
pub use tokenizer::{Tokenizer, TokenizerChoice};
