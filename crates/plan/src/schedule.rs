//! The order of forwards and backwards on each stage of a pipeline, and when each would run if all chunks took equally long.

use serde::{Deserialize, Serialize};

use crate::spec::Micro;

/// Order of micro-batches on the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019): activations of all micro-batches are alive at once.
    Gpipe,
    /// As many forwards as there are later stages, then one forward, one backward (Narayanan et al. 2021): activations of at
    /// most as many micro-batches as there are stages from this one on.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// Each stage has several chunks of the chain, `stages` chunks apart, and takes them in turn (Narayanan et al. 2021): the
    /// idle time is divided by their number, messages are multiplied by it, and early stages hold more.
    Interleaved {
        /// Chunks of each stage.
        chunks: u32,
    },
    /// As 1f1b, with gradients of weights computed when there is nothing better to do (ZB-H1 of Qi et al. 2024): a third of
    /// the idle time, and every stage holds as much as the first of 1f1b.
    ZeroBubble,
    /// Two chunks a stage, placed down the stages and up again, and gradients of weights apart (ZB-V of Qi et al. 2024): no
    /// idle time once the pipeline is full, and every stage holds as much as the first of 1f1b.
    ZeroBubbleV,
}

/// One pass of one micro-batch through a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    /// The whole backward.
    Backward,
    /// The gradient of the input only.
    Input,
    /// The gradients of the weights.
    Weights,
}

/// What a stage does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) pass: Pass,
    /// Counted along the chain, over all stages.
    pub(crate) chunk: u32,
    pub(crate) micro: Micro,
    /// When it runs if a forward, and each half of a backward, takes one unit of time in every chunk.
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl Turn {
    fn new(pass: Pass, chunk: u32, micro: u32) -> Self {
        Self { pass, chunk, micro: Micro(micro), start: 0, end: 0 }
    }

    fn duration(&self) -> u32 {
        if self.pass == Pass::Backward { 2 } else { 1 }
    }
}

impl Schedule {
    /// Chunks of the chain that each stage has.
    #[must_use]
    pub const fn chunks(self) -> u32 {
        match self {
            Self::Gpipe | Self::OneFOneB | Self::ZeroBubble => 1,
            Self::Interleaved { chunks } => chunks,
            Self::ZeroBubbleV => 2,
        }
    }

    /// Gradients of weights are computed apart from those of inputs.
    #[must_use]
    pub const fn splits(self) -> bool {
        matches!(self, Self::ZeroBubble | Self::ZeroBubbleV)
    }

    /// The stage that has a chunk, counted along the chain.
    #[must_use]
    pub const fn stage_of(self, chunk: u32, stages: u32) -> u32 {
        match self {
            Self::ZeroBubbleV if chunk >= stages => 2 * stages - 1 - chunk,
            _ => chunk % stages,
        }
    }

    /// Passes of micro-batches through chunks that a stage holds the activations of at most. With one stage nothing is gained
    /// by holding more than one micro-batch.
    #[must_use]
    pub fn in_flight(self, stage: u32, stages: u32, micro_batches: u32) -> u32 {
        match self {
            Self::Gpipe if stages > 1 => micro_batches,
            Self::Gpipe | Self::OneFOneB => (stages - stage).min(micro_batches),
            Self::Interleaved { chunks } => {
                let ahead = 2 * (stages - stage - 1) + (chunks - 1) * round_sizes(stages, micro_batches)[0];
                (ahead + 1).min(chunks * micro_batches)
            }
            Self::ZeroBubble => stages.min(micro_batches),
            Self::ZeroBubbleV if micro_batches + 1 >= 2 * stages => 2 * stages,
            // The pipeline is never full: what its order holds.
            Self::ZeroBubbleV => {
                let (mut now, mut most) = (0, 0);
                for turn in self.order(stage, stages, micro_batches) {
                    match turn.pass {
                        Pass::Forward => now += 1,
                        Pass::Weights => now -= 1,
                        Pass::Input | Pass::Backward => {}
                    }
                    most = most.max(now);
                }
                most
            }
        }
    }

    /// Share of a step in which a stage has nothing to do, when a forward, a gradient of the input and one of the weights take
    /// equally long in all chunks, and messages no time.
    #[must_use]
    pub fn bubble(self, stages: u32, micro_batches: u32) -> f64 {
        let (p, m, v) = (f64::from(stages), f64::from(micro_batches), f64::from(self.chunks()));
        let enough = match self {
            Self::Gpipe | Self::OneFOneB => true,
            Self::Interleaved { .. } | Self::ZeroBubble => micro_batches >= stages,
            Self::ZeroBubbleV => micro_batches + 1 >= 2 * stages,
        };
        if !enough {
            // The pipeline is never full, and there is no formula.
            let end = self.timed(stages, micro_batches).iter().flatten().map(|t| t.end).max().unwrap_or(1);
            return 1.0 - 3.0 * v * m / f64::from(end);
        }
        let work = match self {
            Self::Gpipe | Self::OneFOneB | Self::Interleaved { .. } => v * m,
            Self::ZeroBubble | Self::ZeroBubbleV => 3.0 * v * m,
        };
        (p - 1.0) / (work + p - 1.0)
    }

    /// What a stage does, in order. Backwards of a chunk, and gradients of its weights, are in the order of micro-batches in
    /// every schedule, so that gradients are summed alike.
    fn order(self, stage: u32, stages: u32, micros: u32) -> Vec<Turn> {
        match self {
            Self::Gpipe | Self::OneFOneB => {
                let all = |pass| (0..micros).map(|m| Turn::new(pass, stage, m)).collect();
                one_each(all(Pass::Forward), all(Pass::Backward), self.in_flight(stage, stages, micros) as usize)
            }
            Self::Interleaved { chunks } => interleaved(chunks, stage, stages, micros),
            Self::ZeroBubble => zero_bubble(stage, stages, micros),
            Self::ZeroBubbleV => zero_bubble_v(stage, stages, micros),
        }
    }

    /// What each stage does, and when.
    ///
    /// # Panics
    /// When an order cannot be run to its end: a bug of this file.
    pub(crate) fn timed(self, stages: u32, micros: u32) -> Vec<Vec<Turn>> {
        let mut lists: Vec<Vec<Turn>> = (0..stages).map(|s| self.order(s, stages, micros)).collect();
        let mut clock = Clock::new(stages * self.chunks(), micros);
        let (mut at, mut free) = (vec![0; lists.len()], vec![0; lists.len()]);
        loop {
            let mut moved = false;
            for (stage, list) in lists.iter_mut().enumerate() {
                while let Some(turn) = list.get_mut(at[stage]) {
                    let Some(ready) = clock.ready(turn) else { break };
                    turn.start = ready.max(free[stage]);
                    turn.end = turn.start + turn.duration();
                    free[stage] = turn.end;
                    clock.done(turn);
                    (at[stage], moved) = (at[stage] + 1, true);
                }
            }
            if !moved {
                break;
            }
        }
        for (stage, list) in lists.iter().enumerate() {
            let what = format!("{self:?}, {stages} stages, {micros} micro-batches");
            assert_eq!(at[stage], list.len(), "{what}: stage {stage} waits for ever");
        }
        lists
    }
}

/// When forwards, and gradients of inputs, of each chunk and micro-batch are done.
struct Clock {
    chunks: u32,
    micros: u32,
    forwards: Vec<Option<u32>>,
    backwards: Vec<Option<u32>>,
}

impl Clock {
    fn new(chunks: u32, micros: u32) -> Self {
        let none = vec![None; (chunks * micros) as usize];
        Self { chunks, micros, forwards: none.clone(), backwards: none }
    }

    fn index(&self, chunk: u32, micro: Micro) -> usize {
        (chunk * self.micros + micro.0) as usize
    }

    /// When what a turn needs is there.
    fn ready(&self, turn: &Turn) -> Option<u32> {
        let &Turn { pass, chunk, micro, .. } = turn;
        match pass {
            Pass::Forward if chunk == 0 => Some(0),
            Pass::Forward => self.forwards[self.index(chunk - 1, micro)],
            Pass::Weights => self.backwards[self.index(chunk, micro)],
            Pass::Backward | Pass::Input => {
                let own = self.forwards[self.index(chunk, micro)]?;
                let last = chunk + 1 == self.chunks;
                Some(own.max(if last { 0 } else { self.backwards[self.index(chunk + 1, micro)]? }))
            }
        }
    }

    fn done(&mut self, turn: &Turn) {
        let at = self.index(turn.chunk, turn.micro);
        match turn.pass {
            Pass::Forward => self.forwards[at] = Some(turn.end),
            Pass::Backward | Pass::Input => self.backwards[at] = Some(turn.end),
            Pass::Weights => {}
        }
    }
}

/// `ahead` forwards, then a backward and a forward in turn.
fn one_each(forwards: Vec<Turn>, backwards: Vec<Turn>, ahead: usize) -> Vec<Turn> {
    let mut turns = forwards[..ahead].to_vec();
    let mut later = forwards[ahead..].iter();
    for backward in backwards {
        turns.push(backward);
        turns.extend(later.next());
    }
    turns
}

/// Micro-batches of each round of an interleaved schedule: at least one for each stage where there are so many, and in the
/// first rounds as many as in any, or later rounds would wait for themselves.
fn round_sizes(stages: u32, micros: u32) -> Vec<u32> {
    let rounds = (micros / stages).max(1);
    (0..rounds).map(|r| micros / rounds + u32::from(r < micros % rounds)).collect()
}

/// In each round every chunk of the stage takes all micro-batches of the round, one chunk after the other.
fn interleaved(chunks: u32, stage: u32, stages: u32, micros: u32) -> Vec<Turn> {
    let (mut forwards, mut backwards) = (Vec::new(), Vec::new());
    let mut first = 0;
    let sizes = round_sizes(stages, micros);
    for size in &sizes {
        let round = first..first + size;
        for chunk in 0..chunks {
            let turn = |pass, chunk, m| Turn::new(pass, chunk * stages + stage, m);
            forwards.extend(round.clone().map(|m| turn(Pass::Forward, chunk, m)));
            backwards.extend(round.clone().map(|m| turn(Pass::Backward, chunks - 1 - chunk, m)));
        }
        first += size;
    }
    // The forward that fills the place of each backward comes after it, so one more than these are in flight.
    let ahead = 2 * (stages - stage - 1) + (chunks - 1) * sizes[0];
    let ahead = forwards.len().min(ahead as usize);
    let mut turns = forwards[..ahead].to_vec();
    let mut backwards = backwards.into_iter();
    for forward in &forwards[ahead..] {
        turns.push(*forward);
        turns.extend(backwards.next());
    }
    turns.extend(backwards);
    turns
}

/// ZB-H1: the stage's number is how many gradients of weights may wait, which fills the time that a later stage gains.
fn zero_bubble(stage: u32, stages: u32, micros: u32) -> Vec<Turn> {
    let turn = |pass, m| Turn::new(pass, stage, m);
    let ahead = (stages - stage).min(micros);
    let mut turns: Vec<Turn> = (0..ahead).map(|m| turn(Pass::Forward, m)).collect();
    let mut weights = 0;
    for backward in 0..micros {
        turns.push(turn(Pass::Input, backward));
        let forward = backward + ahead;
        let full = forward.min(micros) - weights >= stages.min(micros) && forward < micros;
        if backward + 1 - weights > stage || full {
            turns.push(turn(Pass::Weights, weights));
            weights += 1;
        }
        if forward < micros {
            turns.push(turn(Pass::Forward, forward));
        }
    }
    turns.extend((weights..micros).map(|m| turn(Pass::Weights, m)));
    turns
}

/// ZB-V: forwards down the first chunks, then alternately with the second ones; from then on each stage runs a forward and a
/// backward of each chunk in turn; at the end gradients of inputs come first, and those of weights fill the rest.
fn zero_bubble_v(stage: u32, stages: u32, micros: u32) -> Vec<Turn> {
    // With fewer the same order has gaps.
    let full = micros.max(2 * stages - 1);
    let mut v = TwoChunks { chunks: [stage, 2 * stages - 1 - stage], next: [[0; 3]; 2], turns: Vec::new() };
    for _ in 0..2 * (stages - stage) - 1 {
        v.push(Pass::Forward, 0);
    }
    for _ in 0..stage {
        v.push(Pass::Forward, 1);
        v.push(Pass::Forward, 0);
    }
    for _ in stage..stages {
        v.push(Pass::Forward, 1);
        v.whole(1);
    }
    while v.forwards(1) < v.forwards(0) || v.forwards(0) < full {
        if v.forwards(0) < full {
            v.push(Pass::Forward, 0);
        }
        v.whole(0);
        v.push(Pass::Forward, 1);
        v.whole(1);
    }
    for _ in 0..stage {
        v.push(Pass::Input, 0);
        v.push(Pass::Input, 1);
    }
    for _ in stage..stages {
        v.push(Pass::Input, 0);
        v.push(Pass::Weights, 0);
    }
    for chunk in [1, 0] {
        while v.next[chunk][2] < v.next[chunk][1] {
            v.push(Pass::Weights, chunk);
        }
    }
    v.turns.retain(|turn| turn.micro.0 < micros);
    v.turns
}

/// Counts micro-batches of two chunks.
struct TwoChunks {
    chunks: [u32; 2],
    /// Of each chunk: the next micro-batch of forwards, gradients of inputs, gradients of weights.
    next: [[u32; 3]; 2],
    turns: Vec<Turn>,
}

impl TwoChunks {
    fn push(&mut self, pass: Pass, chunk: usize) {
        let kind = match pass {
            Pass::Forward => 0,
            Pass::Input | Pass::Backward => 1,
            Pass::Weights => 2,
        };
        let next = &mut self.next[chunk][kind];
        self.turns.push(Turn::new(pass, self.chunks[chunk], *next));
        *next += 1;
    }

    fn whole(&mut self, chunk: usize) {
        self.push(Pass::Input, chunk);
        self.push(Pass::Weights, chunk);
    }

    fn forwards(&self, chunk: usize) -> u32 {
        self.next[chunk][0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedules() -> Vec<Schedule> {
        let interleaved = (1..=4).map(|chunks| Schedule::Interleaved { chunks });
        [Schedule::Gpipe, Schedule::OneFOneB, Schedule::ZeroBubble, Schedule::ZeroBubbleV]
            .into_iter()
            .chain(interleaved)
            .collect()
    }

    #[test]
    fn every_order_ends_when_its_formula_says_and_holds_what_it_says() {
        let _limit = testkit::time_limit(20);
        for schedule in schedules() {
            for stages in 1..=8 {
                for micros in 1..=20 {
                    let what = format!("{schedule:?}, {stages} stages, {micros} micro-batches");
                    let lists = schedule.timed(stages, micros);
                    let end = lists.iter().flatten().map(|t| t.end).max().expect("there are turns");
                    let work = 3 * micros * schedule.chunks();
                    let idle = 1.0 - f64::from(work) / f64::from(end);
                    assert!((idle - schedule.bubble(stages, micros)).abs() < 1e-12, "{what}: {idle}");
                    for (stage, list) in lists.iter().enumerate() {
                        let (mut now, mut most) = (0, 0);
                        for turn in list {
                            match turn.pass {
                                Pass::Forward => now += 1,
                                Pass::Backward | Pass::Weights => now -= 1,
                                Pass::Input => {}
                            }
                            most = most.max(now);
                        }
                        assert_eq!(
                            (now, most),
                            (0, schedule.in_flight(stage as u32, stages, micros)),
                            "{what}, {stage}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn passes_of_a_chunk_are_in_the_order_of_micro_batches() {
        let _limit = testkit::time_limit(20);
        for schedule in schedules() {
            for (stages, micros) in [(1, 3), (2, 7), (4, 8), (5, 13)] {
                for list in schedule.timed(stages, micros) {
                    for chunk in 0..stages * schedule.chunks() {
                        for pass in [Pass::Forward, Pass::Backward, Pass::Input, Pass::Weights] {
                            let of = list.iter().filter(|t| t.chunk == chunk && t.pass == pass);
                            let micros: Vec<u32> = of.map(|t| t.micro.0).collect();
                            assert!(micros.is_sorted(), "{schedule:?} {stages} {chunk} {pass:?}: {micros:?}");
                        }
                    }
                }
            }
        }
    }
}
