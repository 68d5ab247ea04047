//! Every option, every mistake.

use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};
use gpurun_model::{Family, ModelConfig};

use super::*;

/// Trains a model
#[derive(Parser, Debug)]
#[command(name = "train")]
struct Line {
    #[command(flatten)]
    train: TrainArgs,
}

fn line(words: &str) -> TrainArgs {
    Line::try_parse_from(std::iter::once("train").chain(words.split_whitespace())).unwrap().train
}

fn file(text: &str) -> config::FileOptions {
    config::parse(text, Path::new("run.toml")).unwrap()
}

fn options(words: &str, text: &str) -> TrainOptions {
    line(words).resolve_with(file(text)).unwrap()
}

/// The one line that a mistake on the command line or in the file gets.
fn mistake(words: &str, text: &str) -> String {
    let error = config::parse(text, Path::new("run.toml")).and_then(|file| line(words).resolve_with(file));
    let error = error.expect_err(&format!("{words} / {text}")).to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn nothing_given_trains_the_tiny_model_on_the_built_in_corpus() {
    let _limit = testkit::time_limit(10);
    let o = line("").resolve().unwrap();
    assert_eq!(o.model.choice, ModelChoice::Preset("tiny".to_owned()));
    assert_eq!(o.model.config, ModelConfig::preset("tiny").unwrap());
    assert!(o.data.is_empty() && o.out.is_none() && o.resume.is_none());
    assert_eq!((o.seq_len, o.global_batch, o.length), (128, 24, Length::Steps(300)));
    assert!(o.seq_len <= o.model.config.context);
    for world in [1, 2, 3, 4, 6, 8] {
        let m = o.micro_batches(world).unwrap();
        assert_eq!(m.sequences * m.count as usize * world as usize, 24, "{world} ranks");
    }
    let rate = o.learning_rate(300).unwrap();
    assert_eq!((rate.peak, rate.warmup, rate.schedule), (3e-3, 20, Schedule::Cosine));
}

#[test]
fn every_option_is_taken_from_the_line_and_from_the_file_under_the_same_name() {
    let _limit = testkit::time_limit(20);
    let values = [
        ("model", "llama-1b", "\"llama-1b\""),
        ("data", "Cargo.toml", "[\"Cargo.toml\"]"),
        ("eval-data", "Cargo.toml", "\"Cargo.toml\""),
        ("eval-every", "7", "7"),
        ("tokenizer", "Cargo.toml", "\"Cargo.toml\""),
        ("seq-len", "64", "64"),
        ("micro-batch", "2", "2"),
        ("global-batch", "12", "12"),
        ("steps", "50", "50"),
        ("epochs", "1.5", "1.5"),
        ("lr", "1e-4", "1e-4"),
        ("min-lr", "1e-5", "1e-5"),
        ("warmup", "3", "3"),
        ("schedule", "wsd", "\"wsd\""),
        ("weight-decay", "0", "0"),
        ("beta1", "0.8", "0.8"),
        ("beta2", "0.99", "0.99"),
        ("eps", "1e-9", "1e-9"),
        ("clip", "0.5", "0.5"),
        ("dtype", "fp16", "\"fp16\""),
        ("adam-dtype", "bf16", "\"bf16\""),
        ("loss-scale", "1024", "1024"),
        ("zero", "2", "2"),
        ("offload", "optimizer", "\"optimizer\""),
        ("offload-via", "stream", "\"stream\""),
        ("offload-fraction", "0.5", "0.5"),
        ("recompute", "full", "\"full\""),
        ("pp", "2", "2"),
        ("pp-schedule", "interleaved", "\"interleaved\""),
        ("pp-chunks", "3", "3"),
        ("pp-split", "1,2,1", "[1, 2, 1]"),
        ("gpu-memory-limit", "24GiB", "\"24GiB\""),
        ("device", "cpu", "\"cpu\""),
        ("share-gpu", "true", "true"),
        ("threads", "2", "2"),
        ("seed", "9", "9"),
        ("out", "somewhere", "\"somewhere\""),
        ("save-every", "10", "10"),
        ("keep", "5", "5"),
        ("resume", "auto", "\"auto\""),
        ("metrics", "m.jsonl", "\"m.jsonl\""),
        ("dropout", "0", "0"),
    ];
    let command = Line::command();
    let mut known: Vec<&str> = command.get_arguments().filter_map(|a| a.get_long()).collect();
    known.retain(|name| *name != "config" && *name != "help");
    assert_eq!(known.len(), values.len(), "each option is in the table above");
    let default = TrainArgs::default();
    for (name, word, toml) in values {
        assert!(known.contains(&name), "{name}");
        let flag = line(&format!("--{name} {word}"));
        assert_ne!(flag, default, "--{name} is kept");
        assert_eq!(file(&format!("{name} = {toml}")).args, flag, "{name} in the file");
        // The other value is not kept when both are given.
        assert_eq!(flag.clone().or(file(&format!("{name} = {toml}")).args), flag);
    }
    // All at once, but for those that exclude others, have the effect that they should.
    let all = |skip: &[&str]| {
        let words = values.iter().filter(|(name, ..)| !skip.contains(name));
        words.map(|(name, word, _)| format!("--{name} {word} ")).collect::<String>()
    };
    let o = options(&all(&["epochs", "dropout"]), "");
    let json = serde_json::to_value(&o).unwrap();
    let expected = serde_json::json!({
        "data": ["Cargo.toml"], "eval_data": ["Cargo.toml"], "eval_every": 7, "tokenizer": {"file": "Cargo.toml"},
        "seq_len": 64, "micro_batch": 2, "global_batch": 12, "length": {"steps": 50}, "lr": 1e-4, "min_lr": 1e-5,
        "warmup": 3, "schedule": "wsd", "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.99, "eps": 1e-9, "clip": 0.5,
        "dtype": "f16", "adam_dtype": "bf16", "loss_scale": 1024.0, "zero": 2, "offload": "optimizer", "offload_via": "stream",
        "offload_fraction": 0.5, "recompute": "full", "pp": 2, "pp_schedule": "interleaved", "pp_chunks": 3, "pp_split": [1, 2, 1],
        "gpu_memory_limit": 25_769_803_776u64, "device": "cpu", "share_gpu": true, "threads": 2, "seed": 9, "out": "somewhere",
        "save_every": 10, "keep": 5, "resume": "auto", "metrics": "m.jsonl",
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&json[name], value, "{name}");
    }
    assert_eq!(json.as_object().unwrap().len(), expected.as_object().unwrap().len() + 1, "and the model");
    assert_eq!(json["model"]["choice"]["preset"], "llama-1b");
}

#[test]
fn flags_win_over_the_file() {
    let _limit = testkit::time_limit(10);
    let text = "steps = 10\nlr = 0.5\ndata = [\"Cargo.toml\", \"src\"]\nmodel = \"llama-7b\"";
    let o = options("--steps 20 --data src --model tiny", text);
    assert_eq!((o.length, o.lr, o.data), (Length::Steps(20), 0.5, vec![PathBuf::from("src")]));
    assert_eq!(o.model.choice, ModelChoice::Preset("tiny".to_owned()));
    // Steps and epochs are two ways to say one thing.
    assert_eq!(options("--epochs 2", text).length, Length::Epochs(2.0));
    // A mistake is looked for where the value is from.
    assert!(mistake("--lr 0", "lr = 1").starts_with("--lr: 0 is"));
    assert!(mistake("", "# rate\nlr = -1").starts_with("run.toml:2: lr: -1 is"));
    // The other way round too: a good flag mends a bad file.
    assert_eq!(options("--lr 1", "lr = -1").lr, 1.0);
}

#[test]
fn numbers_out_of_range_are_named_with_the_way_out() {
    let _limit = testkit::time_limit(10);
    let cases = [
        ("--lr NaN", "--lr: NaN is no positive number; give a number above 0 such as 3e-3"),
        ("--lr -1e-3", "--lr: -0.001 is no positive number; give a number above 0 such as 3e-3"),
        ("--lr inf", "--lr: inf is no positive number; give a number above 0 such as 3e-3"),
        ("--eps 0", "--eps: 0 is no positive number; give a number above 0 such as 1e-8"),
        ("--epochs 0", "--epochs: 0 is no positive number; give a number above 0 such as 1"),
        ("--min-lr NaN", "--min-lr: NaN is out of range; give a number of 0 or above"),
        ("--min-lr 1", "--min-lr: 1 is above the highest learning rate, 0.003; give at most that, or a higher --lr"),
        ("--weight-decay -0.1", "--weight-decay: -0.1 is out of range; give a number of 0 or above"),
        ("--weight-decay inf", "--weight-decay: inf is out of range; give a number of 0 or above"),
        ("--clip -1", "--clip: -1 is out of range; give a number of 0 or above"),
        ("--beta1 1", "--beta1: 1 is out of range; give a number from 0 up to but not 1, such as 0.9"),
        ("--beta2 NaN", "--beta2: NaN is out of range; give a number from 0 up to but not 1, such as 0.95"),
        ("--steps 0", "--steps: 0 is too few; give at least 1, such as 300"),
        ("--seq-len 0", "--seq-len: 0 is too few; give at least 1, such as 128"),
        (
            "--micro-batch auto",
            "--micro-batch: auto is the most that fits a limit, and there is none; add --gpu-memory-limit BYTES, or give a number",
        ),
        ("--micro-batch 0", "--micro-batch: 0 is too few; give at least 1, such as 4"),
        ("--global-batch 0", "--global-batch: 0 is too few; give at least 1, such as 24"),
        ("--threads 0", "--threads: 0 is too few; give at least 1, or leave it out"),
        ("--out x --keep 0", "--keep: 0 is too few; give at least 1, or leave it out to keep 2"),
        (
            "--out x --save-every 0",
            "--save-every: 0 is too few; give at least 1, or leave it out to save every 500 steps",
        ),
        ("--dtype fp16 --loss-scale 0", "--loss-scale: 0 is no positive number; give a number above 0 such as 65536"),
        (
            "--offload optimizer --offload-fraction 1.5",
            "--offload-fraction: 1.5 is out of range; give a number from 0 to 1",
        ),
        ("--warmup 301", "--warmup: a warm-up of 301 steps does not fit a run of 300; give at most 300, or more steps"),
    ];
    for (words, expected) in cases {
        assert_eq!(mistake(words, ""), expected);
    }
}

#[test]
fn options_that_exclude_each_other_or_have_no_effect_are_refused() {
    let _limit = testkit::time_limit(10);
    let cases = [
        ("--steps 1 --epochs 1", "--epochs: excludes --steps; give one of the two"),
        ("--save-every 5", "--save-every: has no effect without a folder for checkpoints; add --out DIR"),
        ("--keep 5", "--keep: has no effect without a folder for checkpoints; add --out DIR"),
        ("--resume auto", "--resume: auto looks in the folder of --out, which is not given; add --out DIR"),
        ("--loss-scale 2", "--loss-scale: has no effect but in fp16; add --dtype fp16, or leave it out"),
        (
            "--offload-via host",
            "--offload-via: has no effect while nothing is offloaded; add --offload optimizer, or leave it out",
        ),
        (
            "--offload none --offload-fraction 1",
            "--offload-fraction: has no effect while nothing is offloaded; add --offload optimizer, or leave it out",
        ),
        (
            "--offload optimizer --offload-fraction auto",
            "--offload-fraction: auto is the least that fits a limit, and there is none; add --gpu-memory-limit BYTES, or give a number",
        ),
        ("--eval-every 0 --eval-data src", "--eval-data: is not used with --eval-every 0; leave out one of the two"),
        (
            "--schedule constant --min-lr 0",
            "--min-lr: has no effect with --schedule constant; leave it out, or choose another schedule",
        ),
        (
            "--dropout 0",
            "--dropout: has no effect: models that start from a seed have no dropout; leave it out, or add --model HF_DIR",
        ),
    ];
    for (words, expected) in cases {
        assert_eq!(mistake(words, ""), expected);
    }
}

#[test]
fn paths_that_are_not_there_are_named() {
    let _limit = testkit::time_limit(10);
    let cases = [
        ("--data src nowhere", "--data: nowhere does not exist; check the path; it is relative to the working folder"),
        (
            "--eval-data nowhere",
            "--eval-data: nowhere does not exist; check the path; it is relative to the working folder",
        ),
        ("--tokenizer nowhere", "--tokenizer: there is no file nowhere; give `bytes` or the path of a tokenizer.json"),
        (
            "--resume nowhere",
            "--resume: there is no folder nowhere; give `auto` or the folder of a checkpoint (step-...)",
        ),
    ];
    for (words, expected) in cases {
        assert_eq!(mistake(words, ""), expected);
    }
    let error = line("--config nowhere.toml").resolve().unwrap_err().to_string();
    assert!(error.starts_with("--config nowhere.toml: "), "{error}");
}

#[test]
fn the_file_is_checked_line_by_line() {
    let _limit = testkit::time_limit(10);
    let cases = [
        ("\nsteps = 1\nwarmpu = 3", "run.toml:3: unknown key warmpu; did you mean warmup?"),
        ("learning_rate = 1", "run.toml:1: unknown key learning_rate; did you mean lr?"),
        ("global_batch = 16", "run.toml:1: unknown key global_batch; did you mean global-batch?"),
        ("config = \"other.toml\"", "run.toml:1: unknown key config"),
        ("help = true", "run.toml:1: unknown key help"),
        ("[models]\nlayers = 3", "run.toml:1: unknown key models; did you mean model?"),
        ("steps = \"many\"", "run.toml:1: invalid value 'many' for '--steps <N>': invalid digit found in string"),
        ("steps = 3.0", "run.toml:1: invalid value '3.0' for '--steps <N>': invalid digit found in string"),
        ("\nseed = true", "run.toml:2: seed takes a number or a string, not true or false"),
        ("lr = [1, 2]", "run.toml:1: lr takes one value, not a list"),
        ("data = [[1]]", "run.toml:1: data takes a number or a string, not a list"),
        ("[lr]\nx = 1", "run.toml:1: lr takes a number or a string, not a table"),
        ("zero = 4", "run.toml:1: invalid value '4' for '--zero <0..3>' [possible values: 0, 1, 2, 3]"),
        (
            "schedule = \"cosin\"",
            "run.toml:1: invalid value 'cosin' for '--schedule <SCHEDULE>' [possible values: cosine, linear, wsd, constant]; a similar value exists: 'cosine'",
        ),
        ("steps = 1\nsteps = 2", "run.toml:2: duplicate key"),
    ];
    for (text, expected) in cases {
        let found = mistake("", text);
        assert_eq!(found, expected);
    }
    let broken = mistake("", "steps = 1\nlr = \n");
    assert!(broken.starts_with("run.toml:2: "), "{broken}");
}

#[test]
fn the_global_batch_must_divide_and_the_nearest_that_do_are_named() {
    let _limit = testkit::time_limit(10);
    let cut = |words: &str, world| options(words, "").micro_batches(world).map_err(|e| e.to_string());
    assert_eq!(cut("--global-batch 16 --micro-batch 4", 2), Ok(MicroBatches { sequences: 4, count: 2 }));
    assert_eq!(cut("--global-batch 16", 2), Ok(MicroBatches { sequences: 8, count: 1 }));
    assert_eq!(cut("--global-batch 36", 2), Ok(MicroBatches { sequences: 6, count: 3 }));
    assert_eq!(cut("--global-batch 22", 2), Ok(MicroBatches { sequences: 1, count: 11 }));
    let error = "--global-batch: 16 sequences cannot be shared equally by 3 ranks; use 15 or 18";
    assert_eq!(cut("--global-batch 16", 3), Err(error.to_owned()));
    let error =
        "--global-batch: 16 sequences cannot be shared equally by 2 ranks with micro-batches of 3; use 12 or 18";
    assert_eq!(cut("--global-batch 16 --micro-batch 3", 2), Err(error.to_owned()));
    let error = "--global-batch: 3 sequences cannot be shared equally by 4 ranks; use 4";
    assert_eq!(cut("--global-batch 3", 4), Err(error.to_owned()));
    // Stages share a micro-batch; replicas share the step.
    assert_eq!(cut("--global-batch 16 --pp 2", 4), Ok(MicroBatches { sequences: 2, count: 4 }));
    assert_eq!(cut("--global-batch 16 --pp 2 --micro-batch 4", 4), Ok(MicroBatches { sequences: 4, count: 2 }));
    assert_eq!(cut("--global-batch 4 --pp 4", 4), Ok(MicroBatches { sequences: 1, count: 4 }));
    let error = "--global-batch: 15 sequences cannot be shared equally by 2 replicas; use 14 or 16";
    assert_eq!(cut("--global-batch 15 --pp 2", 4), Err(error.to_owned()));
    let error = "--pp: 4 ranks (--nproc) cannot be shared equally by 3 stages; use --pp 1 or 2 or 4, or --nproc 6";
    assert_eq!(cut("--pp 3", 4), Err(error.to_owned()));
    let error = "--pp: 1 rank (--nproc) cannot be shared equally by 2 stages; use --pp 1, or --nproc 2";
    assert_eq!(cut("--pp 2", 1), Err(error.to_owned()));
    let in_file = options("", "\nglobal-batch = 5").micro_batches(2).unwrap_err().to_string();
    assert_eq!(in_file, "run.toml:2: global-batch: 5 sequences cannot be shared equally by 2 ranks; use 4 or 6");
}

#[test]
fn sequences_longer_than_the_model_takes_are_refused() {
    let _limit = testkit::time_limit(10);
    let o = options("--seq-len 512", "");
    o.check_context(None).unwrap();
    o.check_context(Some(512)).unwrap();
    let error = o.check_context(Some(256)).unwrap_err().to_string();
    let expected = "--seq-len: 512 tokens are more than the 256 that the model takes; give at most 256, or a model with a longer context";
    assert_eq!(error, expected);
}

#[test]
fn the_model_table_changes_a_preset_or_stands_for_itself() {
    let _limit = testkit::time_limit(10);
    let tiny = ModelConfig::preset("tiny").unwrap();
    assert_eq!(options("", "[model]\nlayers = 2").model.config, ModelConfig { layers: 2, ..tiny.clone() });
    // What follows from the width follows the new one.
    let wide = options("", "[model]\npreset = \"tiny\"\nwidth = 256").model;
    assert_eq!(wide.config, ModelConfig { width: 256, head_dim: 64, ff: 1024, ..tiny.clone() });
    let heads = options("", "[model]\nheads = 2").model.config;
    assert_eq!(heads, ModelConfig { heads: 2, kv_heads: 2, head_dim: 64, ..tiny.clone() });
    let llama = ModelConfig::preset("llama-1b").unwrap();
    let narrow = options("--model llama-1b", "[model]\npreset = \"tiny\"\nheads = 16\nwidth = 1024").model.config;
    assert_eq!(narrow, ModelConfig { heads: 16, width: 1024, ..llama });
    // With a family, no preset is needed.
    let text = "[model]\nfamily = \"llama\"\nlayers = 2\nwidth = 64\nheads = 4\nkv_heads = 2\nff = 192\nvocabulary = 257\ncontext = 64";
    let own = options("", text).model;
    assert_eq!((own.choice, own.config.family, own.config.tied), (ModelChoice::Custom, Family::Llama, false));
    // In JSON and back, as a checkpoint keeps it.
    let json = serde_json::to_string(&wide).unwrap();
    assert_eq!(serde_json::from_str::<ModelOptions>(&json).unwrap(), wide);
}

#[test]
fn mistakes_in_the_model_are_named() {
    let _limit = testkit::time_limit(10);
    let presets = "tiny, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, llama-1b, llama-7b";
    let near = format!(
        "--model: \"gpt2-124\" is neither a preset nor a folder; did you mean gpt2-124m? The presets are {presets}"
    );
    assert_eq!(mistake("--model gpt2-124", ""), near);
    let far = format!("run.toml:2: model: \"zzz\" is neither a preset nor a folder; the presets are {presets}");
    assert_eq!(mistake("", "\nmodel = \"zzz\""), far);
    let table = [
        ("[model]\nlayer = 3", "run.toml:2: unknown key layer of [model]; did you mean layers?"),
        ("[model]\nlayers = 1.5", "run.toml:2: layers of [model] is 1.5; give a whole number"),
        ("[model]\nlayers = -1", "run.toml:2: layers of [model] is -1; give a whole number"),
        ("[model]\ntied = 1", "run.toml:2: tied of [model] is 1; give true or false"),
        ("[model]\nfamily = 1", "run.toml:2: family of [model] is 1; give a string"),
        ("[model]\neps = nan", "run.toml:2: NaN is no number"),
        ("[model]\npreset = 3", "run.toml:2: preset takes the name of a preset or a folder, not a whole number"),
    ];
    for (text, expected) in table {
        assert_eq!(mistake("", text), expected);
    }
    let heads = mistake("", "[model]\nlayers = 3\nheads = 3");
    assert!(heads.starts_with("run.toml:3: ") && heads.contains("heads = 3"), "{heads}");
    let absent = mistake("", "lr = 1\n[model]\nfamily = \"llama\"\nlayers = 3");
    assert!(absent.starts_with("run.toml:2: ") && absent.contains("width is missing"), "{absent}");
    let empty = mistake("", "\n[model]\nlayers = 0");
    assert!(empty.starts_with("run.toml:3: ") && empty.contains("layers = 0 is out of range"), "{empty}");
}

#[test]
fn a_folder_of_weights_is_a_model() {
    let _limit = testkit::time_limit(10);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let flag = format!("--model {folder}");
    let no_config = mistake(&flag, "");
    assert!(no_config.starts_with(&format!("--model: cannot read {folder}/config.json: ")), "{no_config}");

    let tiny = ModelConfig::preset("tiny").unwrap();
    let mut json = tiny.to_hf_config();
    let write = |json: &serde_json::Value| std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    write(&json);
    let o = options(&flag, "");
    assert_eq!((o.model.choice, o.model.config), (ModelChoice::Folder(dir.path().to_owned()), tiny));
    assert_eq!(o.tokenizer, Tokenizer::Bytes);
    let fixed = mistake(&flag, "[model]\nlayers = 3");
    assert!(fixed.starts_with("run.toml:2: model.layers: the weights in "), "{fixed}");
    let file = dir.path().join("tokenizer.json");
    std::fs::write(&file, "{}").unwrap();
    assert_eq!(options(&flag, "").tokenizer, Tokenizer::File(file));
    assert_eq!(options(&format!("{flag} --tokenizer bytes"), "").tokenizer, Tokenizer::Bytes);

    json["resid_pdrop"] = serde_json::json!(0.1);
    write(&json);
    let refused = mistake(&flag, "");
    assert!(
        refused.contains("resid_pdrop: 0.1 asks for dropout") && refused.ends_with("--dropout 0 does so"),
        "{refused}"
    );
    assert_eq!(options(&format!("{flag} --dropout 0"), "").model.config.layers, 4);
    write(&serde_json::json!({"model_type": "bert"}));
    let other = mistake(&flag, "");
    assert!(other.starts_with(&format!("--model: {folder}: config.json: ")) && other.contains("bert"), "{other}");
}

#[test]
fn mistakes_that_the_command_line_parser_finds_fit_on_a_line() {
    let _limit = testkit::time_limit(10);
    let found = |words: &str| {
        let error = Line::try_parse_from(std::iter::once("train").chain(words.split_whitespace())).unwrap_err();
        one_line(&error)
    };
    let unknown = found("--warmpu 3");
    assert!(
        unknown.starts_with("unexpected argument '--warmpu' found; a similar argument exists: '--warmup'"),
        "{unknown}"
    );
    let dtype = found("--dtype fp8");
    assert!(
        dtype.starts_with("invalid value 'fp8' for '--dtype <DTYPE>' [possible values: fp32, bf16, fp16]"),
        "{dtype}"
    );
    assert_eq!(found("--steps ten"), "invalid value 'ten' for '--steps <N>': invalid digit found in string");
    assert_eq!(found("--steps -3"), "invalid value '-3' for '--steps <N>': invalid digit found in string");
    for words in ["--warmpu 3", "--steps", "--steps 1 --steps 2", "stray"] {
        assert!(!found(words).contains('\n'), "{words}");
    }
    Line::command().debug_assert();
    // The text about the options does not take the place of the text about the command.
    assert_eq!(Line::command().get_about().unwrap().to_string(), "Trains a model");
}

#[test]
fn a_configuration_file_is_read_from_disk() {
    let _limit = testkit::time_limit(10);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("my run.toml");
    std::fs::write(&path, "steps = 12\nwarmup = 13").unwrap();
    let args = TrainArgs { config: Some(path.clone()), ..TrainArgs::default() };
    let error = args.clone().resolve().unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}:2: warmup: a warm-up of 13 steps", path.display())), "{error}");
    let o = TrainArgs { warmup: Some(4), ..args }.resolve().unwrap();
    assert_eq!((o.length, o.warmup), (Length::Steps(12), Some(4)));
}

#[test]
fn epochs_become_whole_steps() {
    let _limit = testkit::time_limit(10);
    let o = options("--epochs 1.5 --global-batch 10 --warmup 20", "");
    assert_eq!(o.steps(100), 15);
    assert_eq!(o.steps(101), 16);
    assert_eq!(o.steps(0), 1);
    assert!(o.learning_rate(15).unwrap_err().to_string().starts_with("--warmup: a warm-up of 20 steps"));
    assert_eq!(options("--steps 7", "").steps(100), 7);
}

#[test]
fn a_resumed_run_is_told_what_it_does_otherwise() {
    let _limit = testkit::time_limit(10);
    let saved = serde_json::to_string(&options("--lr 1e-3 --out a --threads 1 --zero 1", "")).unwrap();
    let saved: serde_json::Value = serde_json::from_str(&saved).unwrap();
    // What does not shape the numbers may change.
    let same = options("--lr 0.001 --out b --threads 2 --zero 3 --save-every 7 --metrics m.jsonl", "");
    assert_eq!(same.changes_since(&saved), Vec::<String>::new());
    let other = options("--lr 2e-3 --min-lr 1e-4 --seed 1 --data src", "").changes_since(&saved);
    let model = options("--lr 1e-3 --model llama-1b", "").changes_since(&saved);
    assert_eq!(model, ["model was {\"preset\":\"tiny\"} and is {\"preset\":\"llama-1b\"}"]);
    let sizes = options("--lr 1e-3", "[model]\nlayers = 3").changes_since(&saved);
    assert_eq!(sizes, ["the model has other sizes"]);
    // A checkpoint may also hold the options as they are made from values rather than from text.
    let value = serde_json::to_value(options("--lr 1e-3", "")).unwrap();
    assert!(same.changes_since(&value).is_empty());
    assert_eq!(other, ["data was [] and is [\"src\"]", "lr was 0.001 and is 0.002", "seed was 0 and is 1"]);
}

#[test]
fn every_option_is_either_shaping_or_known_not_to_be() {
    let _limit = testkit::time_limit(10);
    let free = [
        "eval_every",
        "zero",
        "offload",
        "offload_via",
        "offload_fraction",
        "recompute",
        "pp",
        "pp_schedule",
        "pp_chunks",
        "pp_split",
        "gpu_memory_limit",
        "device",
        "share_gpu",
        "threads",
        "out",
        "save_every",
        "keep",
        "resume",
        "metrics",
    ];
    let json = serde_json::to_value(options("", "")).unwrap();
    let mut names: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let mut listed: Vec<&str> = free.into_iter().chain(["model"]).chain(resolve::SHAPING).collect();
    names.sort_unstable();
    listed.sort_unstable();
    assert_eq!(names, listed);
}

mod rates {
    use super::*;

    fn rate(schedule: Schedule) -> LearningRate {
        LearningRate { peak: 1.0, floor: 0.1, warmup: 10, steps: 110, schedule }
    }

    const ALL: [Schedule; 4] = [Schedule::Cosine, Schedule::Linear, Schedule::Wsd, Schedule::Constant];

    #[test]
    fn the_warm_up_is_a_line_to_the_peak() {
        let _limit = testkit::time_limit(10);
        for schedule in ALL {
            let rate = rate(schedule);
            for step in 0..10 {
                assert!((rate.at(step) - (step + 1) as f64 / 10.0).abs() < 1e-15, "{schedule:?} {step}");
            }
            assert_eq!((rate.at(9), rate.at(10)), (1.0, 1.0), "{schedule:?}");
            assert_eq!(LearningRate { warmup: 0, ..rate }.at(0), 1.0, "{schedule:?}");
        }
    }

    #[test]
    fn known_points() {
        let _limit = testkit::time_limit(10);
        let near = |schedule, step, expected: f64| {
            let found = rate(schedule).at(step);
            assert!((found - expected).abs() < 1e-12, "{schedule:?} at {step}: {found}, expected {expected}");
        };
        near(Schedule::Cosine, 60, 0.55);
        near(Schedule::Cosine, 35, 0.1 + 0.45 * (1.0 + 0.5f64.sqrt()));
        near(Schedule::Linear, 60, 0.55);
        near(Schedule::Linear, 35, 0.775);
        near(Schedule::Wsd, 98, 1.0);
        near(Schedule::Wsd, 99, 1.0);
        near(Schedule::Wsd, 100, 1.0 - 0.9 / 11.0);
        near(Schedule::Wsd, 109, 1.0 - 0.9 * 10.0 / 11.0);
        near(Schedule::Constant, 109, 1.0);
    }

    #[test]
    fn rates_never_rise_after_the_warm_up_and_stay_within_their_bounds() {
        let _limit = testkit::time_limit(10);
        for schedule in ALL {
            for (warmup, steps) in [(0, 1), (1, 1), (0, 2), (5, 5), (9, 10), (10, 110), (100, 105)] {
                let rate = LearningRate { warmup, steps, ..rate(schedule) };
                let mut last = f64::INFINITY;
                for step in warmup..steps + 20 {
                    let now = rate.at(step);
                    assert!((0.1..=1.0).contains(&now) && now <= last, "{rate:?} at {step}: {now} after {last}");
                    last = now;
                }
                let end = if schedule == Schedule::Constant { 1.0 } else { 0.1 };
                assert!((rate.at(steps + 7) - end).abs() < 1e-15 && rate.at(u64::MAX).is_finite(), "{rate:?}");
            }
        }
    }
}
