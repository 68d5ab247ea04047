//! Steps as lines of text, for logs and for terminals.

use std::time::{Duration, Instant};

use gpurun_types::Bytes;
use gpurun_wire::StepReport;

/// Least time between two progress lines.
pub const LINE_EVERY: Duration = Duration::from_secs(5);
/// Steps at the start that each get a line.
const FIRST_STEPS: u64 = 3;

/// Which steps get a line where there is no progress bar: the first, the last, each tenth part of the run, one now and
/// then, and those on which something happened.
#[derive(Debug, Default)]
pub struct PlainProgress {
    shown: u64,
    last: Option<(Instant, u64)>,
}

impl PlainProgress {
    /// True when this step gets a line.
    pub fn wants(&mut self, report: &StepReport) -> bool {
        let tenth = |step: u64| (step * 10).checked_div(report.total_steps);
        let due = match self.last {
            None => true,
            Some((at, step)) => at.elapsed() >= LINE_EVERY || tenth(step) != tenth(report.step),
        };
        let wanted = due
            || self.shown < FIRST_STEPS
            || report.step == report.total_steps
            || report.eval_loss.is_some()
            || report.skipped;
        if wanted {
            self.shown += 1;
            self.last = Some((Instant::now(), report.step));
        }
        wanted
    }
}

/// Which reports of a task are shown: one now and then, and its end if its beginning was shown.
#[derive(Debug)]
pub struct TaskProgress {
    every: Duration,
    last: Option<Instant>,
}

impl TaskProgress {
    /// At most one every so often.
    #[must_use]
    pub const fn new(every: Duration) -> Self {
        Self { every, last: None }
    }

    /// True when this report is shown.
    pub fn wants(&mut self, done: u64, total: u64) -> bool {
        let due = self.last.is_none_or(|last| last.elapsed() >= self.every);
        let over = done >= total;
        if due || over {
            // The next task begins with a report of its own.
            self.last = if over { None } else { Some(Instant::now()) };
        }
        due || over
    }
}

/// A task as one line: `tokenising a.txt  45 %`.
#[must_use]
pub fn describe_task(what: &str, done: u64, total: u64) -> String {
    let percent = if total == 0 { 100.0 } else { done as f64 * 100.0 / total as f64 };
    format!("{what}  {percent:.0} %")
}

/// A step as one line: `step 7/20  loss 2.5000  ...`.
#[must_use]
pub fn describe(report: &StepReport) -> String {
    format!("step {}/{}  {}", report.step, report.total_steps, figures(report))
}

/// The figures of a step: loss, norm, learning rate, tokens per second, and what else there is to say.
#[must_use]
pub fn figures(report: &StepReport) -> String {
    let mut text = format!("loss {:.4}", report.loss);
    if let Some(loss) = report.eval_loss {
        text.push_str(&format!("  held-out {loss:.4}"));
    }
    text.push_str(&format!(
        "  norm {:.3}  lr {:.3e}  {} tokens/s",
        report.grad_norm,
        report.lr,
        thousands(report.tokens_per_second)
    ));
    if let Some(mfu) = report.mfu {
        text.push_str(&format!("  mfu {:.1} %", mfu * 100.0));
    }
    if report.memory_planned > 0 {
        text.push_str(&format!("  memory {}", Bytes(report.memory_planned)));
        if let Some(used) = report.memory_used {
            text.push_str(&format!(" planned, {} used", Bytes(used)));
        }
    }
    if report.skipped {
        let scale = report.loss_scale.map_or(String::new(), |scale| format!(", loss scale {scale}"));
        text.push_str(&format!("  skipped: gradients not finite{scale}"));
    }
    text
}

/// A number with its thousands apart: `12 345`.
fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_dense_at_first_and_sparse_later() {
        let _limit = testkit::time_limit(10);
        let mut plain = PlainProgress::default();
        let shown: Vec<u64> = (1..=100)
            .filter(|step| plain.wants(&StepReport { step: *step, total_steps: 100, ..StepReport::default() }))
            .collect();
        assert_eq!(shown, [1, 2, 3, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
    }

    #[test]
    fn tasks_show_their_beginning_and_end() {
        let _limit = testkit::time_limit(10);
        let mut task = TaskProgress::new(Duration::from_secs(3600));
        let shown: Vec<u64> = (0..=10).filter(|done| task.wants(*done, 10)).collect();
        assert_eq!(shown, [0, 10]);
        assert!(task.wants(0, 5), "the next task is shown at once");
        assert_eq!(describe_task("tokenising a.txt", 1, 3), "tokenising a.txt  33 %");
        assert_eq!(describe_task("nothing", 0, 0), "nothing  100 %");
    }

    #[test]
    fn figures_of_a_step() {
        let _limit = testkit::time_limit(10);
        let report = StepReport {
            step: 7,
            total_steps: 20,
            loss: 2.5,
            grad_norm: 1.0,
            lr: 3e-4,
            tokens_per_second: 1_234_567.4,
            skipped: true,
            loss_scale: Some(1024.0),
            ..StepReport::default()
        };
        assert_eq!(
            describe(&report),
            "step 7/20  loss 2.5000  norm 1.000  lr 3.000e-4  1 234 567 tokens/s  \
             skipped: gradients not finite, loss scale 1024"
        );
        let report = StepReport { mfu: Some(0.4567), memory_planned: 3 << 29, skipped: false, ..report };
        assert!(describe(&report).ends_with(" tokens/s  mfu 45.7 %  memory 1.50 GiB"), "{}", describe(&report));
        let report = StepReport { memory_used: Some(2 << 30), ..report };
        assert!(describe(&report).ends_with("  memory 1.50 GiB planned, 2.00 GiB used"), "{}", describe(&report));
        assert_eq!(thousands(999.6), "1 000");
        assert_eq!(thousands(f64::NAN), "0");
    }
}
