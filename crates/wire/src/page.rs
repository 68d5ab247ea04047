//! Where each rank is, in memory that outlives it: a worker writes its slot at the price of a few stores, and the launcher
//! reads it whatever has become of the worker. That is how the report on a killed rank names its last instruction.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::message::{Phase, Position};

/// Words of one slot: place, step, progress, length of the text, text.
const WORDS: usize = 32;
/// Bytes of one slot.
const SLOT: usize = WORDS * 8;
/// Words before the text.
const TEXT: usize = 4;
/// Longest text of an instruction, in bytes.
const TEXT_BYTES: usize = (WORDS - TEXT) * 8;

/// Bit of the first word that says that the worker waits for others.
const WAITING: u64 = 1 << 32;
/// The phase stands above this bit of the first word.
const PHASE_SHIFT: u32 = 40;

/// The launcher's view of all slots.
#[derive(Debug)]
pub struct Pages {
    file: File,
}

impl Pages {
    /// Memory for `world` ranks, without a name and of a fixed size.
    ///
    /// # Errors
    /// When the system has no memory or descriptor left.
    pub fn create(world: u32) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create("gpurun-positions", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, u64::from(world) * SLOT as u64)?;
        // A mapping of a file that shrinks would kill its reader: this one cannot.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file: OwnedFd::into(fd) })
    }

    /// To be inherited by the workers.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Where `rank` is or was, and its progress counter.
    ///
    /// # Errors
    /// When `rank` has no slot.
    pub fn read(&self, rank: u32) -> io::Result<(Position, u64)> {
        let mut bytes = [0; SLOT];
        self.file.read_exact_at(&mut bytes, u64::from(rank) * SLOT as u64)?;
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_ne_bytes(word)
        };
        let text = &bytes[TEXT * 8..][..(word(3) as usize).min(TEXT_BYTES)];
        Ok((position(word(0), word(1), String::from_utf8_lossy(text).into_owned()), word(2)))
    }
}

fn position(at: u64, step: u64, text: String) -> Position {
    let phase = phase(at);
    let instruction = (at as u32).checked_sub(1);
    let waiting = at & WAITING != 0 || phase == Phase::Boundary;
    Position { phase, step, instruction, text: if instruction.is_some() { text } else { String::new() }, waiting }
}

fn phase(at: u64) -> Phase {
    Phase::from_number((at >> PHASE_SHIFT) as u8).unwrap_or_default()
}

enum Words {
    /// In memory that the launcher reads.
    Mapped(MmapRaw),
    /// In this process only.
    Own(Box<[AtomicU64; WORDS]>),
}

/// A worker's slot. Any thread may write; of two that write at once, the last one is seen.
pub struct Slot {
    words: Words,
}

impl Default for Slot {
    fn default() -> Self {
        Self { words: Words::Own(Box::new(std::array::from_fn(|_| AtomicU64::new(0)))) }
    }
}

impl Slot {
    /// The slot of `rank` in the launcher's memory.
    ///
    /// # Errors
    /// When the file has no such slot, or cannot be mapped.
    pub fn map(file: &File, rank: u32) -> io::Result<Self> {
        let start = u64::from(rank) * SLOT as u64;
        let size = file.metadata()?.len();
        if size < start + SLOT as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{size} bytes hold no slot of rank {rank}"),
            ));
        }
        let map = MmapOptions::new().offset(start).len(SLOT).map_raw(file)?;
        Ok(Self { words: Words::Mapped(map) })
    }

    #[allow(unsafe_code)]
    fn words(&self) -> &[AtomicU64; WORDS] {
        match &self.words {
            Words::Own(words) => words,
            // SAFETY: the mapping is SLOT bytes long, lives as long as `self`, and starts on a multiple of SLOT, hence of 8,
            // bytes behind a page boundary. It is touched only through atomics here, by all handles of it; the launcher
            // reads the file by system calls. The launcher has sealed the file against shrinking.
            Words::Mapped(map) => unsafe { &*map.as_ptr().cast::<[AtomicU64; WORDS]>() },
        }
    }

    /// Enters a phase in `step`.
    pub fn phase(&self, step: u64, phase: Phase) {
        let words = self.words();
        words[1].store(step, Ordering::Relaxed);
        words[0].store((phase as u64) << PHASE_SHIFT, Ordering::Relaxed);
        self.progressed();
    }

    /// Is in an instruction of the current phase, perhaps waiting for other ranks in it. A text beyond 224 bytes is cut.
    pub fn at(&self, instruction: u32, text: &str, waiting: bool) {
        let words = self.words();
        let text = &text.as_bytes()[..text.len().min(TEXT_BYTES)];
        for (word, part) in words[TEXT..].iter().zip(text.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..part.len()].copy_from_slice(part);
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        words[3].store(text.len() as u64, Ordering::Relaxed);
        let phase = words[0].load(Ordering::Relaxed) >> PHASE_SHIFT << PHASE_SHIFT;
        let waiting = if waiting { WAITING } else { 0 };
        words[0].store(phase | waiting | (u64::from(instruction) + 1), Ordering::Relaxed);
        self.progressed();
    }

    /// Got on, wherever it is.
    pub fn progressed(&self) {
        self.words()[2].fetch_add(1, Ordering::Relaxed);
    }

    /// The phase it is in.
    #[must_use]
    pub fn current_phase(&self) -> Phase {
        phase(self.words()[0].load(Ordering::Relaxed))
    }

    /// Where it is, and its progress counter.
    #[must_use]
    pub fn read(&self) -> (Position, u64) {
        let words = self.words();
        let word = |index: usize| words[index].load(Ordering::Relaxed);
        let bytes: Vec<u8> = (TEXT..WORDS).flat_map(|index| word(index).to_ne_bytes()).collect();
        let text = String::from_utf8_lossy(&bytes[..(word(3) as usize).min(TEXT_BYTES)]).into_owned();
        (position(word(0), word(1), text), word(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_reads_what_the_worker_wrote() {
        let _limit = testkit::time_limit(10);
        let pages = Pages::create(3).unwrap();
        let slots: Vec<Slot> = (0..3).map(|rank| Slot::map(pages.file(), rank).unwrap()).collect();
        assert!(Slot::map(pages.file(), 3).is_err());
        slots[2].phase(12, Phase::Step);
        slots[2].at(34, "backward h.2 micro 0", false);
        slots[1].phase(11, Phase::Step);
        slots[1].at(7, &"x".repeat(1000), true);
        drop(slots);
        let (position, progress) = pages.read(2).unwrap();
        assert_eq!(position.to_string(), "in step 12, instruction 34 (backward h.2 micro 0)");
        assert_eq!((position.waiting, progress), (false, 2));
        let (position, _) = pages.read(1).unwrap();
        assert_eq!((position.text.len(), position.waiting, position.step), (TEXT_BYTES, true, 11));
        assert_eq!(pages.read(0).unwrap(), (Position::default(), 0));
        assert!(pages.read(3).is_err());
        assert!(pages.file().set_len(0).is_err(), "the memory is sealed");
    }

    #[test]
    fn a_slot_of_its_own_reads_the_same() {
        let _limit = testkit::time_limit(10);
        let slot = Slot::default();
        slot.phase(3, Phase::Evaluating);
        slot.at(0, "forward wte", false);
        assert_eq!(slot.read().0.to_string(), "in the evaluation after step 3, instruction 0 (forward wte)");
        slot.phase(3, Phase::Boundary);
        let (position, progress) = slot.read();
        assert_eq!((position.to_string().as_str(), position.waiting), ("at the end of step 3", true));
        assert_eq!(progress, 3);
    }
}
