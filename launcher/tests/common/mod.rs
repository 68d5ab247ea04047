//! Drives the real executable.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// The launcher under test.
pub const GPURUN: &str = env!("CARGO_BIN_EXE_gpurun");

/// The example that takes part in the protocol. `cargo test` builds it beside the launcher, except when it is told to run
/// one test file only: then it is built here.
pub fn barrier_job() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = Path::new(GPURUN).with_file_name("examples").join("barrier_job");
        if !path.exists() {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--quiet", "--example", "barrier_job"]).current_dir(env!("CARGO_MANIFEST_DIR"));
            if !cfg!(debug_assertions) {
                cargo.arg("--release");
            }
            assert!(cargo.status().unwrap().success(), "the example barrier_job does not build");
        }
        path
    })
}

/// A launcher with a clean environment, and with no signal ignored: shells ignore SIGINT for what they run in the background,
/// `nohup` ignores SIGHUP, and both are inherited.
pub fn gpurun(words: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal", GPURUN]);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["PET_", "GPURUN_", "SLURM_", "OMPI_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(&name);
        }
    }
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "NO_COLOR"] {
        command.env_remove(name);
    }
    // Logs of jobs that fail on purpose stay in the build folder.
    command.env("TMPDIR", env!("CARGO_TARGET_TMPDIR")).args(words);
    command
}

/// A launcher that runs a shell script in each rank.
pub fn gpurun_sh(options: &[&str], script: &str) -> Command {
    let mut command = gpurun(options);
    command.args(["bash", "-c", script]);
    command
}

/// What a launcher did.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

impl Done {
    /// The launcher's own lines.
    pub fn report(&self) -> Vec<&str> {
        self.stderr.lines().filter_map(|line| line.strip_prefix("gpurun: ")).collect()
    }

    /// The first of them: the first cause.
    pub fn cause(&self) -> &str {
        self.report().first().copied().unwrap_or("(nothing)")
    }

    /// Lines of a rank on standard output, sorted.
    pub fn lines_of(&self, rank: u32) -> BTreeSet<&str> {
        let prefix = format!("[rank {rank}] ");
        self.stdout.lines().filter_map(|line| line.strip_prefix(prefix.as_str())).collect()
    }
}

/// A launcher at work.
pub struct Running {
    pub child: Child,
    stdout: BufReader<ChildStdout>,
    seen: String,
    stderr: JoinHandle<String>,
    begin: Instant,
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        let begin = Instant::now();
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpurun starts");
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut pipe = child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Self { child, stdout, seen: String::new(), stderr, begin }
    }

    /// Reads lines until one contains `text`, and gives that line.
    pub fn wait_for(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            let count = self.stdout.read_line(&mut line).unwrap();
            assert!(count > 0, "gpurun ended before it said {text:?}; it said:\n{}", self.seen);
            self.seen.push_str(&line);
            if line.contains(text) {
                return line;
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn finish(mut self) -> Done {
        let mut rest = Vec::new();
        self.stdout.read_to_end(&mut rest).unwrap();
        let status = self.child.wait().unwrap();
        let seconds = self.begin.elapsed().as_secs_f64();
        self.seen.push_str(&String::from_utf8_lossy(&rest));
        let code = status.code().unwrap_or_else(|| panic!("gpurun was killed: {status}"));
        Done { code, stdout: self.seen, stderr: self.stderr.join().unwrap(), seconds }
    }
}

/// Runs to the end.
pub fn run(command: Command) -> Done {
    Running::start(command).finish()
}

/// Follows a process that may be nobody's child.
pub struct Watched(Option<OwnedFd>);

impl Watched {
    pub fn new(pid: i32) -> Self {
        let pid = Pid::from_raw(pid).expect("a process id");
        Self(rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok())
    }

    /// True when the process has ended, or ends within `limit`.
    pub fn is_gone_within(&self, limit: Duration) -> bool {
        let Some(fd) = &self.0 else { return true };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
    }
}

/// The number behind `name=` in a line.
pub fn number_in(line: &str, name: &str) -> i32 {
    let rest = line.split(&format!("{name}=")).nth(1).unwrap_or_else(|| panic!("no {name}= in {line:?}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}
