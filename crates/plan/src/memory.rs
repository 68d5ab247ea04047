//! Places buffers in arenas: persistent ones first, transient ones where others of disjoint lifetimes may lie too.

use std::ops::RangeInclusive;

use gpurun_types::{Bytes, Place};

use crate::ir::{Buffer, BufferId, Program};

/// Every buffer starts on a multiple of this, in bytes.
pub(crate) const ALIGN: u64 = 256;

/// First and last instruction that touch each buffer, in list order.
pub(crate) fn lifetimes(buffers: usize, program: &Program) -> Vec<Option<RangeInclusive<u32>>> {
    let mut lives: Vec<Option<RangeInclusive<u32>>> = vec![None; buffers];
    for (index, instr) in program.instrs.iter().enumerate() {
        let accesses = instr.op.accesses();
        for region in accesses.reads.iter().chain(&accesses.writes) {
            let life = &mut lives[region.buffer.0 as usize];
            let first = life.as_ref().map_or(index as u32, |l| *l.start());
            *life = Some(first..=index as u32);
        }
    }
    lives
}

/// Sets every offset; returns the size of the device and of the host arena.
pub(crate) fn place(buffers: &mut [Buffer], programs: &[&Program]) -> [Bytes; 2] {
    let lives: Vec<_> = programs.iter().map(|program| lifetimes(buffers.len(), program)).collect();
    [Place::Device, Place::Host].map(|place| {
        let mut base = 0;
        for buffer in buffers.iter_mut().filter(|b| b.place == place && b.persistent) {
            buffer.offset = base;
            base += buffer.bytes().align_up(ALIGN).0;
        }
        let ends = programs.iter().zip(&lives).map(|(p, lives)| place_transient(buffers, p, lives, place, base));
        Bytes(ends.max().unwrap_or(base))
    })
}

/// Places the transient buffers of one program above `base`, the largest first, each at the lowest offset where it meets no
/// other that is alive at the same time. Returns the end of the highest.
fn place_transient(
    buffers: &mut [Buffer],
    program: &Program,
    lives: &[Option<RangeInclusive<u32>>],
    place: Place,
    base: u64,
) -> u64 {
    let mut order: Vec<BufferId> = (0..buffers.len() as u32)
        .map(BufferId)
        .filter(|id| {
            let buffer = &buffers[id.0 as usize];
            buffer.place == place && !buffer.persistent && lives[id.0 as usize].is_some()
        })
        .collect();
    order.sort_by_key(|id| (std::cmp::Reverse(buffers[id.0 as usize].bytes()), *id));
    let mut placed = Placed::new(program.instrs.len());
    let mut end = base;
    for id in order {
        let life = lives[id.0 as usize].clone().expect("filtered above");
        let size = buffers[id.0 as usize].bytes().align_up(ALIGN).0;
        let offset = placed.lowest(&life, size, base);
        buffers[id.0 as usize].offset = offset;
        placed.push(life, offset, offset + size);
        end = end.max(offset + size);
    }
    end
}

/// Buffers that have a place, found by when they are alive: of thousands, few are alive together.
struct Placed {
    /// Life, first byte, and the byte behind the last.
    all: Vec<(RangeInclusive<u32>, u64, u64)>,
    /// Those alive in each stretch of [`STRETCH`] instructions: first those whose life began before it, then those whose life
    /// begins in it. Those that meet a life are the first stretch's of both kinds and the later ones' of the second: each once.
    stretches: Vec<[Vec<u32>; 2]>,
    /// Of one search, kept for the next.
    taken: Vec<(u64, u64)>,
}

const STRETCH: u32 = 32;

impl Placed {
    fn new(instrs: usize) -> Self {
        let stretches = vec![[Vec::new(), Vec::new()]; instrs.div_ceil(STRETCH as usize) + 1];
        Self { all: Vec::new(), stretches, taken: Vec::new() }
    }

    fn stretches(life: &RangeInclusive<u32>) -> RangeInclusive<usize> {
        (*life.start() / STRETCH) as usize..=(*life.end() / STRETCH) as usize
    }

    fn push(&mut self, life: RangeInclusive<u32>, from: u64, to: u64) {
        let index = self.all.len() as u32;
        let stretches = Self::stretches(&life);
        for (at, stretch) in self.stretches[stretches].iter_mut().enumerate() {
            stretch[usize::from(at == 0)].push(index);
        }
        self.all.push((life, from, to));
    }

    /// The lowest offset from `base` where `size` bytes meet nothing that is alive in `life`.
    fn lowest(&mut self, life: &RangeInclusive<u32>, size: u64, base: u64) -> u64 {
        let stretches = &self.stretches[Self::stretches(life)];
        let near = stretches[0][0].iter().chain(stretches.iter().flat_map(|[_, begin]| begin));
        let met = near
            .map(|index| &self.all[*index as usize])
            .filter(|(other, ..)| other.start() <= life.end() && life.start() <= other.end())
            .map(|(_, from, to)| (*from, *to));
        self.taken.clear();
        self.taken.extend(met);
        let mut offset = base;
        // Of what is met, little lies below the first gap that is large enough: what starts in reach of the offset moves it on,
        // and is looked at no more.
        loop {
            let mut moved = offset;
            self.taken.retain(|&(from, to)| {
                let reached = from < moved + size;
                if reached {
                    moved = moved.max(to);
                }
                !reached && to > moved
            });
            if moved == offset {
                return offset;
            }
            offset = moved;
        }
    }
}
