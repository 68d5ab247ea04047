//! The launcher's own options, from flags and `PET_*` variables, and what they ask for.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use clap::error::ErrorKind;

use crate::builtin::{self, Builtin, Call, Place};
use crate::machine;

/// Starts one worker process per rank, brings them together, and ends them together.
#[derive(Parser, Debug)]
#[command(name = "gpurun", version, next_line_help = true)]
struct Options {
    /// Workers to start on this machine: a number, `auto`, `gpu` or `cpu`.
    /// `auto` is one per GPU or, where there is none, one per two physical
    /// cores. Default: 1.
    #[arg(
        long,
        visible_alias = "nproc-per-node",
        env = "PET_NPROC_PER_NODE",
        value_name = "N|auto",
        allow_negative_numbers = true,
        verbatim_doc_comment
    )]
    nproc: Option<String>,

    /// How often a job that failed (exit 4 or 6) is started again; a training
    /// job goes on from its last checkpoint.
    #[arg(
        long,
        env = "PET_MAX_RESTARTS",
        value_name = "K",
        default_value_t = 0,
        allow_negative_numbers = true,
        verbatim_doc_comment
    )]
    max_restarts: u32,

    /// Folder for one log file per rank. Default: a temporary folder, removed
    /// when the job succeeds.
    #[arg(long, env = "PET_LOG_DIR", value_name = "DIR", verbatim_doc_comment)]
    log_dir: Option<PathBuf>,

    /// Seconds without progress after which a rank counts as hung; 0 for never.
    /// A program that does not use the gpurun library shows no progress: of it
    /// only a stopped process (SIGSTOP) is noticed.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "60",
        value_parser = seconds,
        allow_negative_numbers = true,
        verbatim_doc_comment
    )]
    hang_timeout: Duration,

    /// Seconds between asking workers to end and killing them; a checkpoint that
    /// is being written is waited for. Default: 30 after Ctrl-C or SIGTERM, 1
    /// after a failure.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true, verbatim_doc_comment)]
    grace: Option<Duration>,

    /// Print the workers' lines as they are, without `[rank N]`.
    #[arg(long)]
    no_prefix: bool,

    /// A built-in program, or any executable, and its arguments. Workers read
    /// nothing from standard input.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM", verbatim_doc_comment)]
    program: Vec<OsString>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "give a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(value).map_err(|_| "give a number of seconds, 0 or more".to_owned())
}

/// What is to be started.
#[derive(Clone, Debug)]
pub enum Program {
    /// This executable, as a worker.
    Builtin(&'static str),
    /// Another executable, by its path.
    Other(PathBuf),
}

/// A job for the launcher.
#[derive(Clone, Debug)]
pub struct Job {
    /// What each worker runs.
    pub program: Program,
    /// As typed.
    pub name: OsString,
    /// The program's arguments.
    pub arguments: Vec<OsString>,
    /// Workers.
    pub nproc: u32,
    /// Restarts of a failed job.
    pub max_restarts: u32,
    /// Folder of the logs, if chosen.
    pub log_dir: Option<PathBuf>,
    /// `None` for never.
    pub hang_timeout: Option<Duration>,
    /// `None` for the defaults.
    pub grace: Option<Duration>,
    /// Prefix lines with their rank.
    pub prefix: bool,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Request {
    /// Start workers.
    Launch(Job),
    /// Run a built-in in this process.
    Here(&'static Builtin, Call),
    /// Print a text: help or version.
    Print(String),
}

/// Reads the command line and the environment.
///
/// # Errors
/// One line that says what is wrong and how to mend it.
pub fn parse(arguments: Vec<OsString>) -> anyhow::Result<Request> {
    let options = match Options::try_parse_from(arguments) {
        Ok(options) => options,
        Err(error) => return refused(&error),
    };
    let mut words = options.program.into_iter();
    let name = words.next().context("name a PROGRAM to run")?;
    let arguments: Vec<OsString> = words.collect();
    let builtin = builtin::find(&name);
    // A worker's help would come from every rank.
    let wants_help = || arguments.iter().any(|word| word == "--help" || word == "-h");
    if let Some(builtin) = builtin
        && (builtin.place == Place::Here || wants_help() || options.nproc.is_none() && is_worker()?)
    {
        if !builtin.takes_nproc && options.nproc.is_some() {
            bail!("--nproc means nothing to `{0}`, which runs in one process; write `gpurun {0}`", builtin.name);
        }
        let nproc = options.nproc.as_deref().map(|asked| workers(Some(asked))).transpose()?;
        return Ok(Request::Here(builtin, Call { arguments, nproc }));
    }
    check_single_node()?;
    let program = match builtin {
        Some(builtin) => Program::Builtin(builtin.name),
        None => Program::Other(find_program(&name)?),
    };
    Ok(Request::Launch(Job {
        program,
        name,
        arguments,
        nproc: workers(options.nproc.as_deref())?,
        max_restarts: options.max_restarts,
        log_dir: options.log_dir,
        hang_timeout: (!options.hang_timeout.is_zero()).then_some(options.hang_timeout),
        grace: options.grace,
        prefix: !options.no_prefix,
    }))
}

/// Help and version are no errors; an error becomes one line.
fn refused(error: &clap::Error) -> anyhow::Result<Request> {
    match error.kind() {
        ErrorKind::DisplayHelp => Ok(Request::Print(format!("{}{}", error.render(), builtins_help()))),
        ErrorKind::DisplayVersion => Ok(Request::Print(error.render().to_string())),
        ErrorKind::MissingRequiredArgument => {
            bail!("name a PROGRAM to run, for example `gpurun --nproc 2 train`; `gpurun --help` lists options")
        }
        _ => {
            let text = error.render().to_string();
            let line: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:")).collect();
            let line = line.join(" ");
            let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
            bail!(
                "{} (`gpurun --help` lists options)",
                line.trim_start_matches("error: ").replace(" For more information, try '--help'.", "")
            )
        }
    }
}

fn builtins_help() -> String {
    let mut text = String::new();
    if !builtin::BUILTINS.is_empty() {
        text.push_str("\nBuilt-in programs:\n");
        for builtin in builtin::BUILTINS {
            text.push_str(&format!("  {:<9} {}\n", builtin.name, builtin.about));
        }
        text.push_str("`gpurun PROGRAM --help` shows a program's options.\n");
    }
    text
}

/// True when a launcher or a job manager has started this process as one rank of several.
fn is_worker() -> anyhow::Result<bool> {
    let place = gpurun::worker::Place::from_env();
    let place = place.context("this looks like one rank of several (give --nproc to start ranks here instead)")?;
    Ok(place.world > 1 || std::env::var_os("GPURUN_WORKER").is_some())
}

/// `PET_NNODES` and `PET_NODE_RANK`, as Kubernetes training jobs set them, may say only that there is one machine.
fn check_single_node() -> anyhow::Result<()> {
    for (variable, fine) in [("PET_NNODES", &["1", "1:1"][..]), ("PET_NODE_RANK", &["0"][..])] {
        if let Some(value) = std::env::var_os(variable)
            && !fine.iter().any(|fine| value == *fine)
        {
            bail!(
                "{variable}={} asks for several machines, and this launcher starts workers on one; start each rank with \
                 RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set instead",
                value.to_string_lossy()
            );
        }
    }
    Ok(())
}

fn workers(asked: Option<&str>) -> anyhow::Result<u32> {
    let count = match asked {
        None => 1,
        Some("auto") => machine::default_workers(),
        Some("gpu") => match machine::gpus() {
            0 => bail!("--nproc gpu: this machine has no GPU that may be used; give a number or `auto`"),
            count => count,
        },
        Some("cpu") => machine::cpu_workers(),
        Some(text) => text.parse().ok().with_context(|| {
            format!(
                "--nproc {text}: give a number of workers of at least 1, or `auto` (also read from PET_NPROC_PER_NODE)"
            )
        })?,
    };
    if count == 0 {
        bail!("--nproc 0: a job has at least one worker; give a number of at least 1, or `auto`");
    }
    if count > 4096 {
        bail!("--nproc {count}: more workers than one machine can run; the limit is 4096");
    }
    Ok(count)
}

/// The executable that a name stands for: a path, or a file on `PATH`.
fn find_program(name: &OsStr) -> anyhow::Result<PathBuf> {
    let shown = name.to_string_lossy();
    if name.as_encoded_bytes().contains(&b'/') {
        let path = Path::new(name);
        let about = std::fs::metadata(path).with_context(|| format!("cannot run {shown}"))?;
        if !about.is_file() {
            bail!("cannot run {shown}: it is no file");
        }
        if about.permissions().mode() & 0o111 == 0 {
            bail!("cannot run {shown}: it is not executable; `chmod +x {shown}` makes it so");
        }
        return Ok(path.to_owned());
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    for folder in std::env::split_paths(&folders) {
        let path = folder.join(name);
        if std::fs::metadata(&path).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0) {
            return Ok(path);
        }
    }
    let names = builtin::BUILTINS.iter().map(|builtin| builtin.name);
    let known = names.clone().collect::<Vec<_>>().join(", ");
    match builtin::nearest(&shown, names) {
        Some(near) => bail!("no program {shown}: did you mean `{near}`?"),
        None if Path::new(name).is_file() => bail!("no program {shown} on PATH: to run the file here, write ./{shown}"),
        None => bail!("no program {shown}: it is neither built in ({known}) nor on PATH"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> anyhow::Result<Request> {
        parse(std::iter::once("gpurun").chain(words.iter().copied()).map(OsString::from).collect())
    }

    #[test]
    fn the_options_are_sound() {
        let _limit = testkit::time_limit(10);
        <Options as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn words_behind_the_program_are_its_own() {
        let _limit = testkit::time_limit(10);
        let Ok(Request::Launch(job)) = parse_words(&["--nproc", "3", "sh", "--nproc", "-x", "--help", "--", "y"])
        else {
            panic!("not a job")
        };
        assert_eq!(job.nproc, 3);
        assert_eq!(job.arguments, ["--nproc", "-x", "--help", "--", "y"]);
    }

    #[test]
    fn every_mistake_is_one_line_that_says_how_to_mend_it() {
        let _limit = testkit::time_limit(10);
        for (words, said) in [
            (&["--nproc", "0", "sh"][..], "at least 1"),
            (&["--nproc", "two", "sh"], "auto"),
            (&["--nproc", "-1", "sh"], "--nproc"),
            (&["--nproc", "5000", "sh"], "4096"),
            (&["--nprocs", "1", "sh"], "'--nproc'"),
            (&["--grace", "soon", "sh"], "number of seconds"),
            (&["--hang-timeout", "-3", "sh"], "--hang-timeout"),
            (&["--max-restarts", "x", "sh"], "--max-restarts"),
            (&[], "PROGRAM"),
            (&["/no/such/file"], "No such file"),
            (&["/"], "no file"),
            (&["/etc/passwd"], "chmod +x"),
            (&["no-such-program-anywhere"], "neither built in"),
        ] {
            let error = format!("{:#}", parse_words(words).unwrap_err());
            assert!(error.contains(said), "{words:?}: {error}");
            assert!(!error.contains('\n'), "{words:?}: {error}");
        }
    }
}
