//! Everything the user sees, from one thread: workers' lines, progress, the launcher's own words, and the logs. A slow
//! terminal holds up the output, never the supervision.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context;
use gpurun::worker::progress::{LINE_EVERY, PlainProgress, TaskProgress, describe, describe_task, figures};
use gpurun_wire::StepReport;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::output::lines;

/// Batches of output that may wait for the terminal.
const QUEUE: usize = 256;

/// Which of a worker's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

enum Show {
    /// The permit holds back workers that write faster than the terminal reads.
    Output(u32, Stream, Vec<u8>, OwnedSemaphorePermit),
    Step(StepReport),
    Task(String, u64, u64),
    Say(Stream, String),
    EndProgress,
    Close,
}

/// A handle to the display. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Display {
    queue: mpsc::UnboundedSender<Show>,
    room: Arc<Semaphore>,
}

impl std::fmt::Debug for Show {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Show")
    }
}

impl Display {
    /// Opens the logs in `folder` (created if missing) and starts the thread.
    ///
    /// # Errors
    /// When a log cannot be opened.
    pub fn start(world: u32, folder: &Path, prefix: bool) -> anyhow::Result<(Self, JoinHandle<()>)> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder of the logs, {}", folder.display()))?;
        let logs = (0..world).map(|rank| Log::open(log_path(folder, rank))).collect::<anyhow::Result<Vec<_>>>()?;
        let (queue, shows) = mpsc::unbounded_channel();
        let terminal = Terminal::new(prefix, logs);
        let thread = std::thread::Builder::new().name("display".to_owned()).spawn(move || terminal.run(shows));
        let room = Arc::new(Semaphore::new(QUEUE));
        Ok((Self { queue, room }, thread.context("cannot start the display thread")?))
    }

    /// A piece of a worker's output: whole lines, or a part of a very long one. Waits while the terminal is behind.
    pub async fn output(&self, rank: u32, stream: Stream, piece: Vec<u8>) {
        let permit = self.room.clone().acquire_owned().await.expect("the semaphore is never closed");
        self.show(Show::Output(rank, stream, piece, permit));
    }

    /// Progress. Never waits.
    pub fn step(&self, report: StepReport) {
        self.show(Show::Step(report));
    }

    /// Progress of something long between steps. Never waits.
    pub fn task(&self, what: String, done: u64, total: u64) {
        self.show(Show::Task(what, done, total));
    }

    /// A line of the launcher itself. Never waits.
    pub fn say(&self, stream: Stream, line: String) {
        self.show(Show::Say(stream, line));
    }

    /// Leaves the progress bar where it is; what follows is written below it.
    pub fn end_progress(&self) {
        self.show(Show::EndProgress);
    }

    /// Ends the thread after all that was shown before.
    pub fn close(&self) {
        self.show(Show::Close);
    }

    fn show(&self, show: Show) {
        // The thread ends only by `close`.
        let _closed = self.queue.send(show);
    }
}

/// The log file of a rank.
pub fn log_path(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("rank-{rank}.log"))
}

struct Log {
    path: PathBuf,
    /// `None` once a write has failed.
    file: Option<File>,
    /// The stream of a line that has no end yet.
    open_line: Option<Stream>,
}

impl Log {
    fn open(path: PathBuf) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("cannot open the log {}", path.display()))?;
        Ok(Self { path, file: Some(file), open_line: None })
    }

    /// The bytes as they came; only where the other stream speaks into an unfinished line, a line end comes between.
    fn write(&mut self, stream: Stream, piece: &[u8]) -> std::io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        if self.open_line.is_some_and(|open| open != stream) {
            file.write_all(b"\n")?;
        }
        self.open_line = (!piece.ends_with(b"\n")).then_some(stream);
        file.write_all(piece)
    }
}

struct Terminal {
    prefix: bool,
    /// Whether standard output and standard error are terminals.
    terminal: [bool; 2],
    colour: bool,
    bar: Option<ProgressBar>,
    /// The bar is that of a task, not that of the steps.
    in_task: bool,
    plain: PlainProgress,
    plain_task: TaskProgress,
    logs: Vec<Log>,
}

impl Terminal {
    fn new(prefix: bool, logs: Vec<Log>) -> Self {
        let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let terminal = [std::io::stdout().is_terminal(), std::io::stderr().is_terminal()];
        Self {
            prefix,
            terminal,
            colour,
            bar: None,
            in_task: false,
            plain: PlainProgress::default(),
            plain_task: TaskProgress::new(LINE_EVERY),
            logs,
        }
    }

    fn run(mut self, mut shows: mpsc::UnboundedReceiver<Show>) {
        while let Some(show) = shows.blocking_recv() {
            match show {
                Show::Output(rank, stream, piece, _permit) => self.output(rank, stream, &piece),
                Show::Step(report) => self.step(&report),
                Show::Task(what, done, total) => self.task(&what, done, total),
                Show::Say(stream, line) => self.write(stream, format!("{line}\n").as_bytes()),
                Show::EndProgress => self.end_progress(),
                Show::Close => break,
            }
        }
        self.end_progress();
    }

    fn task(&mut self, what: &str, done: u64, total: u64) {
        let [out, err] = self.terminal;
        if !(out && err) && self.plain_task.wants(done, total) {
            self.write(Stream::Out, format!("{}\n", describe_task(what, done, total)).as_bytes());
        }
        if !err {
            return;
        }
        // The bar of the steps comes back with the next step.
        if done >= total {
            if let Some(bar) = self.bar.take() {
                bar.finish_and_clear();
            }
            return;
        }
        if !self.in_task {
            self.end_progress();
            self.in_task = true;
        }
        let bar = self.bar.get_or_insert_with(|| new_bar("{msg} [{bar:30}] {percent} %  ETA {eta}", 0, total));
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(what.to_owned());
    }

    fn end_progress(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }

    fn output(&mut self, rank: u32, stream: Stream, piece: &[u8]) {
        let log = &mut self.logs[rank as usize];
        if let Err(error) = log.write(stream, piece) {
            log.file = None;
            let warning = format!("gpurun: warning: no further log of rank {rank}: {}: {error}\n", log.path.display());
            self.write(Stream::Err, warning.as_bytes());
        }
        let prefix = self.prefix_of(rank, stream);
        let mut text = Vec::with_capacity(piece.len() + 64);
        for line in lines(piece) {
            text.extend_from_slice(prefix.as_bytes());
            text.extend_from_slice(line);
            text.push(b'\n');
        }
        self.write(stream, &text);
    }

    fn prefix_of(&self, rank: u32, stream: Stream) -> String {
        if !self.prefix {
            return String::new();
        }
        // Cyan, yellow, green, magenta, blue, and their bright forms: red is left to errors.
        const COLOURS: [u8; 10] = [36, 33, 32, 35, 34, 96, 93, 92, 95, 94];
        if self.colour && self.terminal[stream as usize] {
            format!("\x1b[{}m[rank {rank}]\x1b[0m ", COLOURS[rank as usize % COLOURS.len()])
        } else {
            format!("[rank {rank}] ")
        }
    }

    /// Writes above the progress bar. A reader that has gone away does not end a training run: the logs have it all.
    fn write(&self, stream: Stream, text: &[u8]) {
        let write = || {
            let _reader_gone = match stream {
                Stream::Out => std::io::stdout().lock().write_all(text).and_then(|()| std::io::stdout().flush()),
                Stream::Err => std::io::stderr().lock().write_all(text),
            };
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// A bar on a terminal, lines in a file; both when one stream is a terminal and the other is not.
    fn step(&mut self, report: &StepReport) {
        let [out, err] = self.terminal;
        if !(out && err) && self.plain.wants(report) {
            self.write(Stream::Out, format!("{}\n", describe(report)).as_bytes());
        }
        if !err {
            return;
        }
        if self.in_task {
            self.end_progress();
            self.in_task = false;
        }
        let bar = self.bar.get_or_insert_with(|| {
            // A resumed run does not begin at 0, and its rate must not count the steps of an earlier one.
            let before = report.step.saturating_sub(1);
            new_bar("step {pos}/{len} [{bar:30}] {msg}  ETA {eta}", before, report.total_steps)
        });
        bar.set_length(report.total_steps);
        bar.set_position(report.step);
        bar.set_message(figures(report));
        if let Some(loss) = report.eval_loss
            && out
        {
            self.write(Stream::Out, format!("step {}: held-out loss {loss:.4}\n", report.step).as_bytes());
        }
    }
}

fn new_bar(template: &str, position: u64, total: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template(template).expect("templates are constants of this file").progress_chars("=> ");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    bar.set_style(style);
    bar.set_position(position);
    bar.reset_eta();
    bar
}
