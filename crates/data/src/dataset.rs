//! Token streams cut into windows, in a fixed pseudo-random order.

use std::path::PathBuf;

use crate::order::Permutation;
use crate::shard::{Tokens, cached, in_memory};
use crate::{DataError, Tokenizer, TokenizerChoice, locate, source};

/// Where data comes from and how it is cut.
pub struct DataConfig {
    /// Files and folders to train on.
    pub paths: Vec<PathBuf>,
    /// Files and folders held out; empty to hold out a part of `paths`.
    pub eval_paths: Vec<PathBuf>,
    /// Text to tokens.
    pub tokenizer: TokenizerChoice,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Chooses the order.
    pub seed: u64,
    /// Part of the windows, at the end, that is held out when `eval_paths` is empty.
    pub held_out: f64,
    /// Rows of the model's token table.
    pub vocabulary: usize,
    /// Folder for tokenised data; by default one in the user's cache.
    pub cache_dir: Option<PathBuf>,
    /// Documents, by name, to train on instead of `paths`.
    pub embedded: Option<&'static [(&'static str, &'static [u8])]>,
}

/// How far tokenising is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The file being read.
    pub what: &'a str,
    /// Bytes read.
    pub done: u64,
    /// Bytes in all; 0 when not known.
    pub total: u64,
}

/// Sequences to train and evaluate on.
///
/// Documents stand one after the other, each behind end-of-text. Windows of `seq_len + 1` tokens start every `seq_len`
/// tokens: a sequence and its next tokens.
pub struct Dataset {
    tokenizer: Tokenizer,
    train: Tokens,
    eval: Option<Tokens>,
    windows: u64,
    /// First held-out window, when it is of the training stream.
    eval_first: u64,
    eval_windows: u64,
    seq_len: usize,
    seed: u64,
}

impl Dataset {
    /// Opens data; tokenises what has not been tokenised before, telling `progress`.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn open(config: &DataConfig, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Self, DataError> {
        let tokenizer = Tokenizer::open(&config.tokenizer)?;
        let train = match config.embedded {
            Some(documents) => in_memory(documents, &tokenizer)?,
            None => stream(config, &config.paths, &tokenizer, progress)?,
        };
        let paths: &[PathBuf] = if config.embedded.is_some() { &[] } else { &config.paths };
        check(&train, paths, config, &tokenizer, "the training data")?;
        let all = windows(&train, config.seq_len);
        let (mut eval, mut held_out) = (None, 0);
        if config.eval_paths.is_empty() {
            if all > 1 && config.held_out > 0.0 {
                held_out = ((all as f64 * config.held_out) as u64).clamp(1, all - 1);
            }
        } else {
            let tokens = stream(config, &config.eval_paths, &tokenizer, progress)?;
            check(&tokens, &config.eval_paths, config, &tokenizer, "the evaluation data")?;
            held_out = windows(&tokens, config.seq_len);
            eval = Some(tokens);
        }
        let windows = if eval.is_some() { all } else { all - held_out };
        let eval_first = if eval.is_some() { 0 } else { windows };
        let (seq_len, seed) = (config.seq_len, config.seed);
        Ok(Self { tokenizer, train, eval, windows, eval_first, eval_windows: held_out, seq_len, seed })
    }

    /// The tokenizer.
    #[must_use]
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// True when the training stream was made with the tokenizer: shards of tokens may have been made with another.
    #[must_use]
    pub fn speaks_tokenizer(&self) -> bool {
        let mut first = [0];
        self.train.read(0, &mut first);
        first[0] == self.tokenizer.end_of_text()
    }

    /// Tokens of the training stream, held-out part included.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.train.len()
    }

    /// Training sequences of one epoch.
    #[must_use]
    pub const fn windows(&self) -> u64 {
        self.windows
    }

    /// Held-out sequences.
    #[must_use]
    pub const fn eval_windows(&self) -> u64 {
        self.eval_windows
    }

    /// Training sequence number `sample` of the run: a pure function of the seed and that number. All three slices have
    /// `seq_len` elements; `starts[i]` is where the document of token `i` begins in the sequence (0 when before it).
    pub fn fill(&self, sample: u64, tokens: &mut [i32], targets: &mut [i32], starts: &mut [i32]) {
        let (epoch, index) = (sample / self.windows, sample % self.windows);
        let window = Permutation::new(self.windows, self.seed, epoch).at(index);
        self.window(&self.train, window, tokens, targets, starts);
    }

    /// Held-out sequence `index`, in the order of the data.
    pub fn eval_window(&self, index: u64, tokens: &mut [i32], targets: &mut [i32], starts: &mut [i32]) {
        assert!(index < self.eval_windows, "held-out sequence {index} of {}", self.eval_windows);
        let stream = self.eval.as_ref().unwrap_or(&self.train);
        self.window(stream, self.eval_first + index, tokens, targets, starts);
    }

    fn window(&self, from: &Tokens, window: u64, tokens: &mut [i32], targets: &mut [i32], starts: &mut [i32]) {
        let n = self.seq_len;
        assert!(tokens.len() == n && targets.len() == n && starts.len() == n, "sequences have {n} tokens");
        let mut raw = vec![0; n + 1];
        from.read(window * n as u64, &mut raw);
        // Every stream begins with the token that begins its documents.
        let mut end = [0];
        from.read(0, &mut end);
        let mut start = 0;
        for i in 0..n {
            if raw[i] == end[0] {
                start = i as i32;
            }
            (tokens[i], targets[i], starts[i]) = (raw[i] as i32, raw[i + 1] as i32, start);
        }
    }
}

fn stream(
    config: &DataConfig,
    paths: &[PathBuf],
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Tokens, DataError> {
    let sources = source::list(paths)?;
    let tokens = if sources.is_empty() {
        None
    } else {
        Some(cached(&sources, tokenizer, config.cache_dir.as_deref(), progress)?)
    };
    match tokens {
        Some(tokens) if tokens.len() > 0 => Ok(tokens),
        _ => {
            let what = paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
            Err(DataError::Empty { what })
        }
    }
}

const fn windows(tokens: &Tokens, seq_len: usize) -> u64 {
    tokens.len().saturating_sub(1) / seq_len as u64
}

/// What `tokens` was made of: `paths`, or the documents inside the executable.
fn check(
    tokens: &Tokens,
    paths: &[PathBuf],
    config: &DataConfig,
    tokenizer: &Tokenizer,
    what: &'static str,
) -> Result<(), DataError> {
    if tokens.highest() as usize >= config.vocabulary
        && let Some((position, token)) = tokens.first_outside(config.vocabulary)
    {
        locate::first_outside(&source::list(paths)?, tokenizer, config.vocabulary)?;
        // Only documents in memory have no file to name.
        let place = format!("{what}, token {position}");
        return Err(DataError::Vocabulary { place, token, vocabulary: config.vocabulary });
    }
    if windows(tokens, config.seq_len) == 0 {
        return Err(DataError::TooShort { what, tokens: tokens.len(), seq_len: config.seq_len });
    }
    Ok(())
}
