//! `tokenize` and `export`: files in, files out.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use gpurun_checkpoint::hf::export_checkpoint;
use gpurun_data::{Tokenizer, TokenizerChoice, write_bin};
use gpurun_model::ModelConfig;
use gpurun_types::DType;
use serde::Deserialize;

use crate::command::{Failure, command, open_checkpoint};

/// Turn text into one token shard in llm.c's format, which --data reads
#[derive(Parser, Debug)]
#[command(name = "tokenize", max_term_width = 110)]
struct TokenizeArgs {
    /// Text files, .jsonl, or folders of them
    #[arg(required = true, value_name = "PATH")]
    data: Vec<PathBuf>,
    /// Tokenizer: `bytes` or a tokenizer.json
    #[arg(long, value_name = "bytes|FILE", default_value = "bytes")]
    tokenizer: String,
    /// The shard to write, FILE.bin
    #[arg(long, value_name = "FILE.bin")]
    out: PathBuf,
}

/// `tokenize` with these arguments; the process's exit code.
pub fn tokenize_main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> u8 {
    command::<TokenizeArgs>("tokenize", arguments, |args| {
        let choice = match args.tokenizer.as_str() {
            "bytes" => TokenizerChoice::Bytes,
            file => TokenizerChoice::File(file.into()),
        };
        let tokens = write_bin(&args.data, &Tokenizer::open(&choice)?, &args.out, &mut |_| ())?;
        println!("{}: {tokens} tokens", args.out.display());
        Ok(())
    })
}

/// Type of exported weights.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ExportType {
    Fp32,
    Bf16,
}

/// Write the weights of a checkpoint in Hugging Face's layout: model.safetensors and config.json
#[derive(Parser, Debug)]
#[command(name = "export", max_term_width = 110)]
struct ExportArgs {
    /// A checkpoint, or a folder of checkpoints, of which the newest good one is taken
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Type of the weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: ExportType,
}

/// `export` with these arguments; the process's exit code.
pub fn export_main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> u8 {
    command::<ExportArgs>("export", arguments, |args| {
        let checkpoint = open_checkpoint(&args.checkpoint)?;
        let config = ModelConfig::deserialize(&checkpoint.meta().model)
            .map_err(|e| Failure::new(5, format!("the model of the checkpoint: {e}")))?;
        let dtype = match args.dtype {
            ExportType::Fp32 => DType::F32,
            ExportType::Bf16 => DType::Bf16,
        };
        let bytes = export_checkpoint(&checkpoint, &args.out, &config.to_hf_config(), dtype)?;
        println!("{}: {bytes} of {dtype} weights", args.out.display());
        Ok(())
    })
}
