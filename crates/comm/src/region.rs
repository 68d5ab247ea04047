//! The memory that the ranks of one host share: a header, and for each channel a place per rank and a mailbox per pair.
//!
//! The region is a memfd: it has no name, so nothing is left behind when the job dies. It is sparse: only what is used takes
//! memory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Channels of a job, at most.
pub(crate) const CHANNELS: u32 = 64;

/// Ranks of one host, at most.
pub(crate) const MAX_WORLD: u32 = 64;

/// Payload of one half of a rank's place on a channel, in bytes.
pub(crate) const CHUNK: usize = 1 << 20;

/// Payload of one slot of a mailbox, and slots of a mailbox.
pub(crate) const MAIL: usize = 128 << 10;
pub(crate) const SLOTS: u32 = 4;

const PAGE: usize = 4096;
const HEADER: usize = 4 * PAGE;
const PLACE: usize = PAGE + 2 * CHUNK;
const MAILBOX: usize = PAGE + SLOTS as usize * MAIL;
const MAGIC: u32 = 0x6770_7572;
const REASON: usize = 1000;

/// A counter that others wait on.
#[repr(C, align(64))]
pub(crate) struct Counter {
    pub(crate) value: AtomicU32,
    pub(crate) sleepers: AtomicU32,
}

/// What a rank says of itself.
#[repr(C, align(64))]
pub(crate) struct Member {
    /// 0: not here yet, 1: here, 2: left.
    pub(crate) state: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) started: AtomicU64,
}

#[repr(C)]
pub(crate) struct Header {
    magic: AtomicU32,
    world: AtomicU32,
    /// 0: no, 1: the reason is being written, 2: yes.
    pub(crate) aborted: AtomicU32,
    reason_len: AtomicU32,
    reason: [AtomicU8; REASON],
    pub(crate) members: [Member; MAX_WORLD as usize],
}

/// A rank's place on a channel.
#[repr(C)]
pub(crate) struct Control {
    /// Rounds whose payload this rank has put here.
    pub(crate) posted: Counter,
    /// Rounds that this rank has read from everybody.
    pub(crate) done: Counter,
    /// What the payload of each half belongs to.
    pub(crate) labels: [AtomicU64; 2],
}

/// From one rank to another.
#[repr(C)]
pub(crate) struct Mailbox {
    pub(crate) sent: Counter,
    pub(crate) taken: Counter,
    pub(crate) labels: [AtomicU64; SLOTS as usize],
}

const _: () = assert!(size_of::<Header>() <= HEADER && size_of::<Control>() <= PAGE && size_of::<Mailbox>() <= PAGE);

/// Bytes of the region of `world` ranks. Most of them are never touched.
fn size(world: u32) -> usize {
    let (channels, world) = (CHANNELS as usize, world as usize);
    HEADER + channels * world * PLACE + channels * world * world * MAILBOX
}

/// Shared memory for the ranks of one host, without a name: inherited, or opened through `/proc/PID/fd`. It is closed in
/// executed programs unless the caller says otherwise.
///
/// # Errors
/// When `world` is 0 or above 64, or the system refuses.
pub fn create_shared_memory(world: u32) -> io::Result<OwnedFd> {
    if world == 0 || world > MAX_WORLD {
        let what = format!("{world} ranks; shared memory serves 1 to {MAX_WORLD}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let fd = memfd_create("gpurun", MemfdFlags::CLOEXEC)?;
    ftruncate(&fd, size(world) as u64)?;
    let region = Region::map(&fd, world)?;
    region.header().world.store(world, Ordering::SeqCst);
    region.header().magic.store(MAGIC, Ordering::SeqCst);
    Ok(fd)
}

/// Makes every wait of every rank fail. For who supervises the ranks and holds the descriptor.
///
/// # Errors
/// When the descriptor is not that of [`create_shared_memory`].
pub fn abort_shared_memory(fd: impl AsFd, reason: &str) -> io::Result<()> {
    Region::open(fd, None)?.abort(reason);
    Ok(())
}

/// The region, mapped.
pub(crate) struct Region {
    start: NonNull<u8>,
    bytes: usize,
    world: u32,
}

// SAFETY: everything in the region that several threads touch at once is atomic, or payload that the counters hand from
// one to the other.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn map(fd: impl AsFd, world: u32) -> io::Result<Self> {
        let bytes = size(world);
        // SAFETY: a new shared map at an address of the system's choice; its file is at least as long (set by
        // `create_shared_memory`, checked by `open`).
        let start =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("a map at address 0"))?;
        Ok(Self { start, bytes, world })
    }

    /// Maps a region made by [`create_shared_memory`]; checks that it is one, for `world` ranks if given.
    pub(crate) fn open(fd: impl AsFd, world: Option<u32>) -> io::Result<Self> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let bytes = rustix::fs::fstat(&fd)?.st_size as u64;
        let made_for = (1..=MAX_WORLD).find(|w| size(*w) as u64 == bytes);
        let made_for = made_for.ok_or_else(|| bad("the descriptor is not the shared memory of a job".into()))?;
        let region = Self::map(fd, made_for)?;
        let header = region.header();
        if header.magic.load(Ordering::SeqCst) != MAGIC || header.world.load(Ordering::SeqCst) != made_for {
            return Err(bad("the shared memory was not set up".into()));
        }
        match world {
            Some(world) if world != made_for => {
                Err(bad(format!("shared memory of {made_for} ranks in a job of {world}")))
            }
            _ => Ok(region),
        }
    }

    /// A `T` at `offset`.
    fn at<T>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.bytes);
        // SAFETY: in bounds and aligned (offsets are multiples of pages, the map starts at one); `T` is one of the types
        // above, made of atomics only, for which any bytes are valid, zeros at first.
        unsafe { self.start.add(offset).cast::<T>().as_ref() }
    }

    pub(crate) fn header(&self) -> &Header {
        self.at(0)
    }

    fn place(&self, channel: u32, rank: u32) -> usize {
        assert!(channel < CHANNELS && rank < self.world);
        HEADER + (channel * self.world + rank) as usize * PLACE
    }

    pub(crate) fn control(&self, channel: u32, rank: u32) -> &Control {
        self.at(self.place(channel, rank))
    }

    /// Payload of one half of a rank's place: [`CHUNK`] bytes.
    pub(crate) fn chunk(&self, channel: u32, rank: u32, half: u32) -> *mut u8 {
        let offset = self.place(channel, rank) + PAGE + half as usize * CHUNK;
        assert!(half < 2 && offset + CHUNK <= self.bytes);
        // SAFETY: in bounds by the assertion.
        unsafe { self.start.as_ptr().add(offset) }
    }

    fn mail(&self, channel: u32, from: u32, to: u32) -> usize {
        assert!(channel < CHANNELS && from < self.world && to < self.world);
        let places = (CHANNELS * self.world) as usize * PLACE;
        HEADER + places + ((channel * self.world + from) * self.world + to) as usize * MAILBOX
    }

    pub(crate) fn mailbox(&self, channel: u32, from: u32, to: u32) -> &Mailbox {
        self.at(self.mail(channel, from, to))
    }

    /// Payload of one slot of a mailbox: [`MAIL`] bytes.
    pub(crate) fn slot(&self, channel: u32, from: u32, to: u32, slot: u32) -> *mut u8 {
        let offset = self.mail(channel, from, to) + PAGE + slot as usize * MAIL;
        assert!(slot < SLOTS && offset + MAIL <= self.bytes);
        // SAFETY: in bounds by the assertion.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// The first reason stays.
    pub(crate) fn abort(&self, reason: &str) {
        let header = self.header();
        if header.aborted.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        let bytes = reason.as_bytes();
        let len = bytes.len().min(REASON);
        for (to, byte) in header.reason.iter().zip(bytes) {
            to.store(*byte, Ordering::Relaxed);
        }
        header.reason_len.store(len as u32, Ordering::Relaxed);
        header.aborted.store(2, Ordering::SeqCst);
    }

    pub(crate) fn abort_reason(&self) -> Option<String> {
        let header = self.header();
        if header.aborted.load(Ordering::SeqCst) != 2 {
            return None;
        }
        let len = (header.reason_len.load(Ordering::Relaxed) as usize).min(REASON);
        let bytes: Vec<u8> = header.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the map was made by `map` with this length; nothing refers to it once the region is dropped.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a map of our own can be unmapped");
    }
}
