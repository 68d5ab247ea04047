//! Collectives and messages through shared memory.
//!
//! A collective runs in rounds. In round `r` each member puts a chunk into half `r % 2` of its place on the channel, and reads
//! the others' chunks. A half is written again only when every member has read it, two rounds later, so that writing,
//! reading and adding of neighbouring rounds overlap.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpurun_device::{Backend, DeviceError};
use gpurun_types::{DType, Rank, View};

use crate::fabric::Fabric;
use crate::region::{CHUNK, MAIL, SLOTS};
use crate::sum::{self, Sum};
use crate::{CommError, Communicator};

/// Up to this many bytes an all-reduce sends everything to everybody in one round.
const SMALL: usize = 32 << 10;

/// A group of ranks on one channel of shared memory.
pub struct HostCommunicator {
    fabric: Arc<Fabric>,
    channel: u32,
    members: Vec<Rank>,
    index: usize,
    backend: Arc<dyn Backend>,
    /// Rounds begun on this channel. Held for the whole of a collective.
    round: Mutex<u32>,
    sent: Mutex<Vec<u32>>,
    taken: Mutex<Vec<u32>>,
}

/// Kinds of collectives, as labels carry them.
#[derive(Clone, Copy)]
enum Kind {
    AllGather = 1,
    ReduceScatter,
    AllReduce,
    Barrier,
    Message,
}

/// What members must agree on: kind, type and elements.
fn label(kind: Kind, dtype: DType, elements: usize) -> u64 {
    (kind as u64) << 56 | (dtype as u64) << 48 | elements as u64 & 0xffff_ffff_ffff
}

fn describe(label: u64) -> String {
    let kind = match label >> 56 {
        1 => "all-gather",
        2 => "reduce-scatter",
        3 => "all-reduce",
        4 => "barrier",
        5 => "message",
        _ => "nothing known",
    };
    let dtypes = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::F64];
    let dtype = dtypes.iter().find(|d| **d as u64 == label >> 48 & 0xff).map_or("?".into(), ToString::to_string);
    format!("{kind} of {} {dtype} elements", label & 0xffff_ffff_ffff)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A view in this process's memory.
#[derive(Clone, Copy)]
struct Memory {
    start: *mut u8,
    len: usize,
    dtype: DType,
}

impl Memory {
    /// Address of an element.
    fn at(self, element: usize) -> *mut u8 {
        assert!(element <= self.len);
        // SAFETY: within the view, or its end.
        unsafe { self.start.add(element * self.dtype.size()) }
    }
}

/// Copies elements between memory that does not overlap, or is the same.
fn copy(src: *const u8, dst: *mut u8, elements: usize, dtype: DType) {
    if std::ptr::eq(src, dst) {
        return;
    }
    // SAFETY: callers in this file pass runs of `elements` within views or chunks. Payload of a place or mailbox is only
    // touched by its writer until the counter says so, and only by readers after.
    unsafe { std::ptr::copy(src, dst, elements * dtype.size()) }
}

impl HostCommunicator {
    pub(crate) fn new(
        fabric: Arc<Fabric>,
        channel: u32,
        members: Vec<Rank>,
        index: usize,
        backend: Arc<dyn Backend>,
    ) -> Self {
        let zeros = vec![0; members.len()];
        Self {
            fabric,
            channel,
            members,
            index,
            backend,
            round: Mutex::new(0),
            sent: Mutex::new(zeros.clone()),
            taken: Mutex::new(zeros),
        }
    }

    fn memory(&self, view: View) -> Result<Memory, CommError> {
        let start = self.backend.host_pointer(view).ok_or_else(|| {
            let what = format!("the host cannot address this memory of {}", self.backend.name());
            CommError::Device(DeviceError::Missing(what))
        })?;
        Ok(Memory { start, len: view.len, dtype: view.dtype })
    }

    fn me(&self) -> u32 {
        self.members[self.index].0
    }

    /// One round: `put` fills this member's chunk, `take(member, chunk)` reads each member's, in member order.
    fn round(
        &self,
        operation: &'static str,
        round: &mut u32,
        label: u64,
        put: impl FnOnce(*mut u8),
        mut take: impl FnMut(&[*mut u8]),
    ) -> Result<(), CommError> {
        let region = &self.fabric.region;
        let (now, half) = (*round, *round % 2);
        for member in &self.members {
            // Rounds up to two ago are read by everybody: `now - 1` rounds are done.
            self.fabric.wait(operation, *member, &region.control(self.channel, member.0).done, now.wrapping_sub(1))?;
        }
        let mine = region.control(self.channel, self.me());
        put(region.chunk(self.channel, self.me(), half));
        mine.labels[half as usize].store(label, Ordering::SeqCst);
        self.fabric.set(&mine.posted, now.wrapping_add(1));
        let mut chunks = Vec::with_capacity(self.members.len());
        for member in &self.members {
            let control = region.control(self.channel, member.0);
            self.fabric.wait(operation, *member, &control.posted, now.wrapping_add(1))?;
            let theirs = control.labels[half as usize].load(Ordering::SeqCst);
            if theirs != label {
                let detail = format!(
                    "{} is in {} while {member} is in {}",
                    self.members[self.index],
                    describe(label),
                    describe(theirs)
                );
                // The others would wait for a round that never comes.
                self.fabric.abort(&detail);
                return Err(CommError::Mismatch { operation, detail });
            }
            chunks.push(region.chunk(self.channel, member.0, half));
        }
        take(&chunks);
        self.fabric.set(&mine.done, now.wrapping_add(1));
        *round = now.wrapping_add(1);
        Ok(())
    }

    /// Every member's part of `dst` to everybody; this member's own is already in place.
    fn gather_parts(
        &self,
        operation: &'static str,
        round: &mut u32,
        label: u64,
        dst: Memory,
        parts: &[Range<usize>],
    ) -> Result<(), CommError> {
        let step = CHUNK / dst.dtype.size();
        let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        for at in (0..longest).step_by(step) {
            let piece = |part: &Range<usize>| (part.start + at).min(part.end)..(part.start + at + step).min(part.end);
            let own = piece(&parts[self.index]);
            self.round(
                operation,
                round,
                label,
                |chunk| copy(dst.at(own.start), chunk, own.len(), dst.dtype),
                |chunks| {
                    for (member, chunk) in chunks.iter().enumerate().filter(|(m, _)| *m != self.index) {
                        let to = piece(&parts[member]);
                        copy(*chunk, dst.at(to.start), to.len(), dst.dtype);
                    }
                },
            )?;
        }
        Ok(())
    }

    /// This member's part of the sum over members of `src`, into `dst` (which may be that part of `src`).
    #[allow(clippy::too_many_arguments)]
    fn reduce_parts(
        &self,
        operation: &'static str,
        round: &mut u32,
        label: u64,
        src: Memory,
        parts: &[Range<usize>],
        dst: *mut u8,
        how: Sum,
    ) -> Result<(), CommError> {
        let (size, members) = (src.dtype.size(), self.members.len());
        // Each round carries a piece of every part; pieces start at 64-byte lines.
        let step = (CHUNK / members / size) & !63;
        let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        for at in (0..longest).step_by(step) {
            let piece = |part: &Range<usize>| (part.start + at).min(part.end)..(part.start + at + step).min(part.end);
            let own = piece(&parts[self.index]);
            self.round(
                operation,
                round,
                label,
                |chunk| {
                    for (member, part) in parts.iter().enumerate() {
                        let from = piece(part);
                        // SAFETY: `members` pieces of at most `step` elements fit a chunk.
                        let to = unsafe { chunk.add(member * step * size) };
                        copy(src.at(from.start), to, from.len(), src.dtype);
                    }
                },
                |chunks| {
                    // SAFETY: as above.
                    let terms: Vec<*const u8> =
                        chunks.iter().map(|c| unsafe { c.add(self.index * step * size) }.cast_const()).collect();
                    // SAFETY: `at` is within this member's part, which `dst` is as long as.
                    let to = unsafe { dst.add((own.start - parts[self.index].start) * size) };
                    sum::sum(&terms, to, own.len(), src.dtype, how);
                },
            )?;
        }
        Ok(())
    }

    fn check(&self, operation: &'static str, whole: View, part: View) -> Result<(), CommError> {
        if whole.dtype == part.dtype && whole.len == part.len * self.members.len() {
            return Ok(());
        }
        let detail = format!(
            "{} {} elements do not cut into {} parts of {} {}",
            whole.len,
            whole.dtype,
            self.members.len(),
            part.len,
            part.dtype
        );
        Err(CommError::Mismatch { operation, detail })
    }

    fn equal_parts(&self, len: usize) -> Vec<Range<usize>> {
        (0..self.members.len()).map(|i| i * len..(i + 1) * len).collect()
    }

    fn peer(&self, operation: &'static str, index: usize) -> Result<Rank, CommError> {
        match self.members.get(index) {
            Some(rank) if index != self.index => Ok(*rank),
            _ => {
                let detail = format!("member {} and member {index} of {}", self.index, self.members.len());
                Err(CommError::Mismatch { operation, detail })
            }
        }
    }
}

fn summable(operation: &'static str, dtype: DType) -> Result<(), CommError> {
    if dtype == DType::I32 {
        return Err(CommError::Mismatch { operation, detail: "i32 cannot be summed".into() });
    }
    Ok(())
}

impl Communicator for HostCommunicator {
    fn index(&self) -> usize {
        self.index
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn rank_of(&self, index: usize) -> Rank {
        self.members[index]
    }

    fn all_gather(&self, src: View, dst: View) -> Result<(), CommError> {
        const OP: &str = "all-gather";
        self.check(OP, dst, src)?;
        let (from, to) = (self.memory(src)?, self.memory(dst)?);
        let parts = self.equal_parts(src.len);
        copy(from.start, to.at(parts[self.index].start), src.len, src.dtype);
        let mut round = lock(&self.round);
        self.gather_parts(OP, &mut round, label(Kind::AllGather, src.dtype, src.len), to, &parts)
    }

    fn reduce_scatter(&self, src: View, dst: View, accumulate: bool) -> Result<(), CommError> {
        const OP: &str = "reduce-scatter";
        self.check(OP, src, dst)?;
        summable(OP, src.dtype)?;
        let (from, to) = (self.memory(src)?, self.memory(dst)?);
        let how = if accumulate { Sum::Add } else { Sum::Set };
        let parts = self.equal_parts(dst.len);
        let mut round = lock(&self.round);
        let label = label(Kind::ReduceScatter, src.dtype, dst.len);
        self.reduce_parts(OP, &mut round, label, from, &parts, to.start, how)
    }

    fn all_reduce(&self, buffer: View) -> Result<(), CommError> {
        const OP: &str = "all-reduce";
        summable(OP, buffer.dtype)?;
        let memory = self.memory(buffer)?;
        let mut round = lock(&self.round);
        let label = label(Kind::AllReduce, buffer.dtype, buffer.len);
        if buffer.bytes() as usize <= SMALL {
            return self.round(
                OP,
                &mut round,
                label,
                |chunk| copy(memory.start, chunk, memory.len, memory.dtype),
                |chunks| {
                    let terms: Vec<*const u8> = chunks.iter().map(|c| c.cast_const()).collect();
                    sum::sum(&terms, memory.start, memory.len, memory.dtype, Sum::Set);
                },
            );
        }
        let n = self.members.len();
        let parts: Vec<_> = (0..n).map(|i| buffer.len * i / n..buffer.len * (i + 1) / n).collect();
        let own = memory.at(parts[self.index].start);
        self.reduce_parts(OP, &mut round, label, memory, &parts, own, Sum::Set)?;
        self.gather_parts(OP, &mut round, label, memory, &parts)
    }

    fn send(&self, to: usize, src: View) -> Result<(), CommError> {
        const OP: &str = "send";
        let peer = self.peer(OP, to)?;
        let memory = self.memory(src)?;
        let region = &self.fabric.region;
        let mailbox = region.mailbox(self.channel, self.me(), peer.0);
        let mut sent = lock(&self.sent);
        let (step, label) = (MAIL / src.dtype.size(), label(Kind::Message, src.dtype, src.len));
        // A message of no elements is one empty letter, so that the receiver has something to wait for.
        for at in (0..src.len.max(1)).step_by(step) {
            let count = sent[to];
            self.fabric.wait(OP, peer, &mailbox.taken, count.wrapping_sub(SLOTS - 1))?;
            let slot = count % SLOTS;
            copy(memory.at(at), region.slot(self.channel, self.me(), peer.0, slot), step.min(src.len - at), src.dtype);
            mailbox.labels[slot as usize].store(label, Ordering::SeqCst);
            sent[to] = count.wrapping_add(1);
            self.fabric.set(&mailbox.sent, sent[to]);
        }
        Ok(())
    }

    fn recv(&self, from: usize, dst: View) -> Result<(), CommError> {
        const OP: &str = "recv";
        let peer = self.peer(OP, from)?;
        let memory = self.memory(dst)?;
        let region = &self.fabric.region;
        let mailbox = region.mailbox(self.channel, peer.0, self.me());
        let mut taken = lock(&self.taken);
        let (step, label) = (MAIL / dst.dtype.size(), label(Kind::Message, dst.dtype, dst.len));
        for at in (0..dst.len.max(1)).step_by(step) {
            let count = taken[from];
            self.fabric.wait(OP, peer, &mailbox.sent, count.wrapping_add(1))?;
            let slot = count % SLOTS;
            let theirs = mailbox.labels[slot as usize].load(Ordering::SeqCst);
            if theirs != label {
                let detail = format!(
                    "{} expects a {} and {peer} sent a {}",
                    self.members[self.index],
                    describe(label),
                    describe(theirs)
                );
                self.fabric.abort(&detail);
                return Err(CommError::Mismatch { operation: OP, detail });
            }
            copy(region.slot(self.channel, peer.0, self.me(), slot), memory.at(at), step.min(dst.len - at), dst.dtype);
            taken[from] = count.wrapping_add(1);
            self.fabric.set(&mailbox.taken, taken[from]);
        }
        Ok(())
    }

    fn barrier(&self) -> Result<(), CommError> {
        let mut round = lock(&self.round);
        self.round("barrier", &mut round, label(Kind::Barrier, DType::F32, 0), |_| (), |_| ())
    }

    fn abort(&self, reason: &str) {
        self.fabric.abort(reason);
    }
}
