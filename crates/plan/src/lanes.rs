//! What lanes do while others work: idle time of the compute lane, and how much of it goes to communication.

use gpurun_types::Lane;
use serde::Serialize;

use crate::estimate::{Span, Timeline};
use crate::ir::Plan;

/// Time of one rank's lanes of communication, in seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Communication {
    /// In which they work, or wait for other ranks in a collective or message.
    pub seconds: f64,
    /// In which a collective is under way and the compute lane has nothing to do.
    pub exposed_collectives: f64,
    /// In which no collective but a message between stages is under way, and the compute lane has nothing to do. In a pipeline
    /// most of it is waiting for the other stage.
    pub exposed_messages: f64,
}

impl Timeline {
    /// From the first start to the last end of any rank.
    #[must_use]
    pub fn between(ranks: &[Vec<Span>]) -> f64 {
        let spans = || ranks.iter().flatten();
        let end = spans().map(|span| span.end).fold(0.0, f64::max);
        (end - spans().map(|span| span.start).fold(end, f64::min)).max(0.0)
    }

    /// Share of the step in which a rank's compute lane has nothing to do.
    #[must_use]
    pub fn idle(&self, plan: &Plan, rank: usize) -> f64 {
        if self.seconds > 0.0 { 1.0 - self.busy(plan, rank, Lane::Compute) / self.seconds } else { 0.0 }
    }

    /// What a rank's communication takes, and how much of it computation does not hide.
    #[must_use]
    pub fn communication(&self, plan: &Plan, rank: usize) -> Communication {
        let of = |lanes: &[Lane]| {
            let instrs = plan.ranks[rank].train.instrs.iter().zip(&self.ranks[rank]);
            merged(instrs.filter(|(i, _)| lanes.contains(&i.lane)).map(|(_, span)| *span).collect())
        };
        let compute = of(&[Lane::Compute]);
        let collectives = of(&[Lane::Gather, Lane::Reduce]);
        let all = of(&[Lane::Gather, Lane::Reduce, Lane::Send, Lane::Receive]);
        let exposed_collectives = outside(&collectives, &compute);
        Communication {
            seconds: length(&all),
            exposed_collectives,
            exposed_messages: (outside(&all, &compute) - exposed_collectives).max(0.0),
        }
    }
}

/// The same times as spans that do not meet, ascending.
fn merged(mut spans: Vec<Span>) -> Vec<Span> {
    spans.retain(|span| span.end > span.start);
    spans.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut all: Vec<Span> = Vec::new();
    for span in spans {
        match all.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => all.push(span),
        }
    }
    all
}

fn length(spans: &[Span]) -> f64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

/// Seconds of `spans` that lie in none of `others`; both merged.
fn outside(spans: &[Span], others: &[Span]) -> f64 {
    let common = |a: &Span, b: &Span| (a.end.min(b.end) - a.start.max(b.start)).max(0.0);
    // Both ascend: what ends before this span ends before all later ones.
    let mut first = 0;
    let mut inside = 0.0;
    for span in spans {
        while first < others.len() && others[first].end <= span.start {
            first += 1;
        }
        let met = others[first..].iter().take_while(|other| other.start < span.end);
        inside += met.map(|other| common(span, other)).sum::<f64>();
    }
    length(spans) - inside
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(all: &[(f64, f64)]) -> Vec<Span> {
        all.iter().map(|&(start, end)| Span { start, end }).collect()
    }

    #[test]
    fn what_computation_does_not_hide() {
        let _limit = testkit::time_limit(10);
        let compute = merged(spans(&[(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (8.0, 8.0)]));
        assert_eq!(compute, spans(&[(0.0, 3.0), (4.0, 6.0)]));
        assert_eq!(outside(&spans(&[(2.0, 5.0)]), &compute), 1.0);
        assert_eq!(outside(&spans(&[(2.0, 2.5), (5.0, 9.0)]), &compute), 3.0);
        assert_eq!(outside(&spans(&[(0.5, 0.7), (1.0, 1.5), (4.5, 5.0)]), &compute), 0.0);
        assert_eq!(outside(&compute, &[]), 5.0);
    }

    #[test]
    fn a_step_lasts_from_the_first_start_to_the_last_end() {
        let _limit = testkit::time_limit(10);
        assert_eq!(Timeline::between(&[spans(&[(1.0, 2.0)]), spans(&[(0.5, 1.0), (3.0, 4.0)])]), 3.5);
        assert_eq!(Timeline::between(&[]), 0.0);
    }
}
