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
    [Place::Device, Place::Host].map(|place| {
        let mut base = 0;
        for buffer in buffers.iter_mut().filter(|b| b.place == place && b.persistent) {
            buffer.offset = base;
            base += buffer.bytes().align_up(ALIGN).0;
        }
        let ends = programs.iter().map(|program| place_transient(buffers, program, place, base));
        Bytes(ends.max().unwrap_or(base))
    })
}

/// Places the transient buffers of one program above `base`, the largest first, each at the lowest offset where it meets no
/// other that is alive at the same time. Returns the end of the highest.
fn place_transient(buffers: &mut [Buffer], program: &Program, place: Place, base: u64) -> u64 {
    let lives = lifetimes(buffers.len(), program);
    let mut order: Vec<BufferId> = (0..buffers.len() as u32)
        .map(BufferId)
        .filter(|id| {
            let buffer = &buffers[id.0 as usize];
            buffer.place == place && !buffer.persistent && lives[id.0 as usize].is_some()
        })
        .collect();
    order.sort_by_key(|id| (std::cmp::Reverse(buffers[id.0 as usize].bytes()), *id));
    let mut placed: Vec<(u64, u64, u32, u32)> = Vec::new();
    let mut end = base;
    for id in order {
        let life = lives[id.0 as usize].clone().expect("filtered above");
        let (first, last) = (*life.start(), *life.end());
        let size = buffers[id.0 as usize].bytes().align_up(ALIGN).0;
        // `placed` is sorted by offset, so one sweep finds the lowest gap.
        let mut offset = base;
        for &(from, to, born, dies) in &placed {
            if born <= last && first <= dies {
                if offset + size <= from {
                    break;
                }
                offset = offset.max(to);
            }
        }
        buffers[id.0 as usize].offset = offset;
        let at = placed.partition_point(|p| p.0 < offset);
        placed.insert(at, (offset, offset + size, first, last));
        end = end.max(offset + size);
    }
    end
}
