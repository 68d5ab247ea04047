//! Waits between lanes, derived from what instructions declare; and the clocks that say what is ordered.

use gpurun_types::{Lane, Place};

use crate::ir::{Buffer, BufferId, Instr, InstrId, Region};

pub(crate) const LANES: usize = Lane::ALL.len();

/// For each lane: one more than the last of its instructions known to be done; 0 for none.
pub(crate) type Clock = [u32; LANES];

fn join(a: &mut Clock, b: &Clock) {
    for (a, b) in a.iter_mut().zip(b) {
        *a = (*a).max(*b);
    }
}

/// What is known to be done when each instruction is done, from lane order and waits.
pub(crate) struct Clocks {
    lanes: [Clock; LANES],
    done: Vec<Clock>,
}

impl Clocks {
    pub(crate) fn new() -> Self {
        Self { lanes: [[0; LANES]; LANES], done: Vec::new() }
    }

    /// What is known to be done before the next instruction of `lane` begins, without waits.
    pub(crate) fn now(&self, lane: Lane) -> Clock {
        self.lanes[lane.index()]
    }

    /// Adds what a wait for `other` teaches.
    pub(crate) fn learn(&self, clock: &mut Clock, other: InstrId) {
        join(clock, &self.done[other.0 as usize]);
    }

    /// Appends an instruction that begins with `clock` known.
    pub(crate) fn push(&mut self, lane: Lane, mut clock: Clock) {
        clock[lane.index()] = self.done.len() as u32 + 1;
        self.lanes[lane.index()] = clock;
        self.done.push(clock);
    }
}

/// True when `clock` knows that `instr`, which runs on `lane`, is done.
pub(crate) fn knows(clock: &Clock, lane: Lane, instr: InstrId) -> bool {
    clock[lane.index()] > instr.0
}

/// Who touched one run of bytes last.
#[derive(Clone, Default)]
pub(crate) struct Touch {
    pub(crate) writer: Option<(InstrId, BufferId)>,
    /// The last reader on each lane since the last write: earlier ones on a lane are done before it.
    pub(crate) readers: [Option<InstrId>; LANES],
}

/// Both arenas, cut at every bound that an access of the program has.
pub(crate) struct Segments {
    bounds: [Vec<u64>; 2],
    pub(crate) touches: [Vec<Touch>; 2],
}

/// Arena and bytes of a region.
pub(crate) fn bytes_of(buffers: &[Buffer], region: Region) -> (usize, u64, u64) {
    let buffer = &buffers[region.buffer.0 as usize];
    let size = buffer.dtype.size() as u64;
    let start = buffer.offset + region.start as u64 * size;
    (usize::from(buffer.place == Place::Host), start, start + region.len as u64 * size)
}

impl Segments {
    pub(crate) fn new(buffers: &[Buffer], instrs: &[Instr]) -> Self {
        let mut bounds = [Vec::new(), Vec::new()];
        for instr in instrs {
            let accesses = instr.op.accesses();
            for region in accesses.reads.iter().chain(&accesses.writes) {
                let (arena, start, end) = bytes_of(buffers, *region);
                bounds[arena].extend([start, end]);
            }
        }
        for bounds in &mut bounds {
            bounds.sort_unstable();
            bounds.dedup();
        }
        let touches = [0, 1].map(|a| vec![Touch::default(); bounds[a].len()]);
        Self { bounds, touches }
    }

    /// The segments of a region: arena and range of indices.
    pub(crate) fn of(&self, buffers: &[Buffer], region: Region) -> (usize, std::ops::Range<usize>) {
        let (arena, start, end) = bytes_of(buffers, region);
        let find = |at| self.bounds[arena].binary_search(&at).expect("every bound of an access is listed");
        (arena, find(start)..find(end))
    }

    pub(crate) fn read(&mut self, arena: usize, segment: usize, lane: Lane, by: InstrId) {
        self.touches[arena][segment].readers[lane.index()] = Some(by);
    }

    pub(crate) fn write(&mut self, arena: usize, segment: usize, by: InstrId, buffer: BufferId) {
        self.touches[arena][segment] = Touch { writer: Some((by, buffer)), readers: [None; LANES] };
    }
}

/// Sets the waits of every instruction: the fewest that order each conflicting pair, given lane order.
pub(crate) fn derive(buffers: &[Buffer], instrs: &mut [Instr]) {
    let mut segments = Segments::new(buffers, instrs);
    let mut clocks = Clocks::new();
    for index in 0..instrs.len() {
        let id = InstrId(index as u32);
        let lane = instrs[index].lane;
        let accesses = instrs[index].op.accesses();
        let mut needed: Vec<InstrId> = Vec::new();
        for region in &accesses.reads {
            let (arena, range) = segments.of(buffers, *region);
            for segment in range {
                needed.extend(segments.touches[arena][segment].writer.map(|(w, _)| w));
            }
        }
        for region in &accesses.writes {
            let (arena, range) = segments.of(buffers, *region);
            for segment in range {
                let touch = &segments.touches[arena][segment];
                needed.extend(touch.writer.map(|(w, _)| w));
                needed.extend(touch.readers.iter().flatten());
            }
        }
        // Latest first: what a later instruction waited for need not be waited for again.
        needed.sort_unstable_by(|a, b| b.cmp(a));
        needed.dedup();
        let mut clock = clocks.now(lane);
        let mut waits = Vec::new();
        for other in needed {
            if !knows(&clock, instrs[other.0 as usize].lane, other) {
                waits.push(other);
                clocks.learn(&mut clock, other);
            }
        }
        waits.sort_unstable();
        instrs[index].waits = waits;
        clocks.push(lane, clock);
        for region in &accesses.reads {
            let (arena, range) = segments.of(buffers, *region);
            range.for_each(|s| segments.read(arena, s, lane, id));
        }
        for region in &accesses.writes {
            let (arena, range) = segments.of(buffers, *region);
            range.for_each(|s| segments.write(arena, s, id, region.buffer));
        }
    }
}
