//! `sample`: text from a trained model.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use gpurun_checkpoint::Section;
use gpurun_data::{Tokenizer as Words, TokenizerChoice};
use gpurun_device::{Backend, CpuBackend};
use gpurun_engine::{EngineError, Inference, Sampler};
use gpurun_model::ModelConfig;
use gpurun_types::DType;
use serde::Deserialize;

use crate::command::{Failure, command, open_checkpoint};
use crate::options::Tokenizer;

/// Print text from a trained model
#[derive(Parser, Debug)]
#[command(name = "sample", max_term_width = 110)]
struct SampleArgs {
    /// A checkpoint, or a folder of checkpoints, of which the newest good one is taken
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text to go on from [default: the start of a document]
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// Tokens to add at most
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,
    /// Evens out (above 1) or sharpens (below 1) the choice of tokens; 0 takes the likeliest
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Choose among the likeliest K tokens only; 0 for all
    #[arg(long, value_name = "K", default_value_t = 40)]
    top_k: usize,
    /// Another seed, another text
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// `sample` with these arguments; the process's exit code.
pub fn sample_main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> u8 {
    command::<SampleArgs>("sample", arguments, |args| sample(&args))
}

fn sample(args: &SampleArgs) -> Result<(), Failure> {
    if !args.temperature.is_finite() || args.temperature < 0.0 {
        return Err(Failure::new(2, format!("--temperature: {}; give a number from 0", args.temperature)));
    }
    let checkpoint = open_checkpoint(&args.checkpoint)?;
    let meta = checkpoint.meta();
    let wrong = |what: String| Failure::new(5, format!("the model of the checkpoint: {what}"));
    let config = ModelConfig::deserialize(&meta.model).map_err(|e| wrong(e.to_string()))?;
    let model = config.build().map_err(|e| wrong(e.to_string()))?;
    let words = words(meta)?;
    let seq = meta.options["seq_len"].as_u64().map_or(config.context, |s| s as usize).max(1);
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let backend: Arc<dyn Backend> = Arc::new(
        CpuBackend::new(threads).map_err(|source| EngineError::SetUp { what: "starting the CPU backend", source })?,
    );
    let inference = Inference::new(backend, Arc::new(model), DType::F32, seq)?;
    inference.load(|name, start, out| Ok(checkpoint.read(name, Section::Weight, start as u64, out)?))?;
    generate(args, &inference, &words, seq)
}

/// The tokenizer that the run used.
fn words(meta: &gpurun_checkpoint::Meta) -> Result<Words, Failure> {
    let choice = Tokenizer::deserialize(&meta.options["tokenizer"])
        .map_err(|e| Failure::new(5, format!("the tokenizer of the checkpoint: {e}")))?;
    Ok(Words::open(&match choice {
        Tokenizer::Bytes => TokenizerChoice::Bytes,
        Tokenizer::File(file) => TokenizerChoice::File(file),
    })?)
}

fn generate(args: &SampleArgs, inference: &Inference, words: &Words, seq: usize) -> Result<(), Failure> {
    let mut text = vec![words.end_of_text()];
    text.extend(words.encode(&args.prompt)?);
    let first = text.len();
    let mut sampler = Sampler::new(args.temperature, Some(args.top_k).filter(|k| *k > 0), args.seed);
    let mut out = std::io::stdout().lock();
    let mut shown = 0;
    // What is printed is decoded anew from the start of the answer, so that letters of several tokens come out whole.
    let mut show = |text: &[u32], last: bool| -> bool {
        let whole = words.decode(&text[1..]);
        // An unfinished letter decodes to a replacement character; it is held back until it is whole.
        let ready = if last { whole.as_str() } else { whole.trim_end_matches('\u{fffd}') };
        let fresh = ready.get(shown..).unwrap_or_default();
        shown = shown.max(ready.len());
        // A closed pipe ends the text.
        write!(out, "{fresh}").and_then(|()| if last { writeln!(out) } else { out.flush() }).is_ok()
    };
    let mut open = show(&text, false);
    while open && text.len() < first + args.tokens {
        let window = &text[text.len().saturating_sub(seq)..];
        let mut logits = inference.logits(window)?;
        logits.truncate(words.vocabulary());
        let next = sampler.next(&logits) as u32;
        if next == words.end_of_text() {
            break;
        }
        text.push(next);
        open = show(&text, false);
    }
    show(&text, true);
    Ok(())
}
