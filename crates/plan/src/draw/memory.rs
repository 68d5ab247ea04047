//! Bytes by kind over time.

use gpurun_types::Place;

use crate::cost::size;
use crate::estimate::Span;
use crate::ir::{Kind, RankPlan};

/// Memory of one arena over a step.
pub(super) struct Series {
    /// Kinds that have bytes at any time, in the order of [`Kind`].
    pub(super) kinds: Vec<Kind>,
    /// Times, ascending, and from then on the bytes of each of `kinds`.
    pub(super) points: Vec<(f64, Vec<u64>)>,
}

impl Series {
    /// Persistent buffers are there all the time, others from the start of the first instruction that touches them to the
    /// end of the last. Waits see to it that two that share bytes are never there together.
    pub(super) fn of(rank: &RankPlan, spans: &[Span], place: Place) -> Self {
        let mut base: Vec<(Kind, i64)> = Vec::new();
        let mut changes: Vec<(f64, Kind, i64)> = Vec::new();
        let mut alive: Vec<Option<Span>> = vec![None; rank.buffers.len()];
        for (instr, span) in rank.train.instrs.iter().zip(spans) {
            let accesses = instr.op.accesses();
            for region in accesses.reads.iter().chain(&accesses.writes) {
                let life = alive[region.buffer.0 as usize].get_or_insert(*span);
                *life = Span { start: life.start.min(span.start), end: life.end.max(span.end) };
            }
        }
        for (buffer, life) in rank.buffers.iter().zip(alive).filter(|(b, _)| b.place == place) {
            let bytes = size(buffer) as i64;
            match life {
                _ if buffer.persistent => base.push((buffer.kind, bytes)),
                Some(life) => {
                    changes.extend([(life.start, buffer.kind, bytes), (life.end, buffer.kind, -bytes)]);
                }
                // Of the evaluation only.
                None => {}
            }
        }
        let mut kinds: Vec<Kind> = base.iter().map(|b| b.0).chain(changes.iter().map(|c| c.1)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let at = |kind| kinds.iter().position(|k| *k == kind).expect("every kind is listed");
        // What goes at one time goes before what comes.
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
        let mut now = vec![0i64; kinds.len()];
        base.into_iter().for_each(|(kind, bytes)| now[at(kind)] += bytes);
        let read = |now: &[i64]| now.iter().map(|b| *b as u64).collect::<Vec<_>>();
        let mut points = vec![(0.0, read(&now))];
        for (time, kind, bytes) in changes {
            now[at(kind)] += bytes;
            match points.last_mut() {
                Some(last) if last.0 == time => last.1 = read(&now),
                _ => points.push((time, read(&now))),
            }
        }
        Self { kinds, points }
    }

    /// The most bytes at any time.
    pub(super) fn highest(&self) -> u64 {
        self.points.iter().map(|(_, bytes)| bytes.iter().sum()).max().unwrap_or(0)
    }
}
