//! The programs inside this executable.

use std::ffi::{OsStr, OsString};

/// Where a built-in program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In one worker process a rank.
    Workers,
    /// In the launcher's process, without workers.
    Here,
}

/// How a built-in program is called.
#[derive(Debug)]
pub struct Call {
    /// The arguments behind its name.
    pub arguments: Vec<OsString>,
    /// `--nproc`, for programs that run without workers but want to know for how many.
    pub nproc: Option<u32>,
}

/// A program inside this executable.
#[derive(Debug)]
pub struct Builtin {
    /// What the user types.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    /// Where it runs.
    pub place: Place,
    /// `--nproc` means something to it. Always so for programs that run in workers.
    pub takes_nproc: bool,
    /// Runs it, and gives the exit code.
    pub run: fn(&Call) -> u8,
}

/// All of them, in the order of the help.
pub const BUILTINS: &[Builtin] = &[
    Builtin {
        name: "train",
        about: "train a language model, one worker process per rank",
        place: Place::Workers,
        takes_nproc: true,
        run: |call| {
            let name = std::ffi::OsStr::new("train");
            gpurun::train_main(name, call.arguments.iter().cloned(), &gpurun::builtin_model)
        },
    },
    Builtin {
        name: "bench",
        about: "time training steps on random tokens, and show where their time goes",
        place: Place::Workers,
        takes_nproc: true,
        run: |call| gpurun::bench_main(call.arguments.iter().cloned()),
    },
    Builtin {
        name: "plan",
        about: "show what each rank of `train` would hold and send, without running it",
        place: Place::Here,
        takes_nproc: true,
        run: |call| gpurun::plan_main(call.arguments.iter().cloned(), call.nproc.unwrap_or(1)),
    },
    Builtin {
        name: "sample",
        about: "print text from a trained model",
        place: Place::Here,
        takes_nproc: false,
        run: |call| gpurun::sample_main(call.arguments.iter().cloned()),
    },
    Builtin {
        name: "tokenize",
        about: "turn text into a token shard",
        place: Place::Here,
        takes_nproc: false,
        run: |call| gpurun::tokenize_main(call.arguments.iter().cloned()),
    },
    Builtin {
        name: "export",
        about: "write a checkpoint's weights in Hugging Face's layout",
        place: Place::Here,
        takes_nproc: false,
        run: |call| gpurun::export_main(call.arguments.iter().cloned()),
    },
    Builtin {
        name: "doctor",
        about: "show driver, libraries, GPUs, links, memory and disk, and what is missing",
        place: Place::Here,
        takes_nproc: false,
        run: |call| gpurun::doctor_main(call.arguments.iter().cloned()),
    },
];

/// The built-in of a name.
pub fn find(name: &OsStr) -> Option<&'static Builtin> {
    BUILTINS.iter().find(|builtin| name == builtin.name)
}

/// The name among `names` that is most like `typed`, if any is like it.
pub fn nearest<'a>(typed: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = names.into_iter().map(|name| (strsim::jaro_winkler(typed, name), name));
    scored.filter(|(score, _)| *score > 0.8).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typing_errors_find_their_word() {
        let _limit = testkit::time_limit(10);
        let names = ["train", "plan", "sample", "tokenize"];
        assert_eq!(nearest("trian", names), Some("train"));
        assert_eq!(nearest("tokenise", names), Some("tokenize"));
        assert_eq!(nearest("bash", names), None);
    }
}
