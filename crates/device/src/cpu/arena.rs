//! One run of zeroed memory.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use gpurun_types::{Bytes, Place};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::Result;
use crate::DeviceError;

/// Alignment of a map that huge pages can back, and the size from which they pay.
const HUGE_PAGE: u64 = 2 << 20;

/// An anonymous map, unmapped when dropped.
pub(super) struct Arena {
    start: NonNull<u8>,
    bytes: u64,
    place: Place,
    /// Behind the last byte that an operation was given.
    high_water: AtomicU64,
}

// SAFETY: the arena is plain memory; who may touch which bytes when is the plan's to prove (see `Backend`).
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    pub(super) fn new(place: Place, bytes: Bytes) -> Result<Self> {
        let failed = |e: rustix::io::Errno| DeviceError::OutOfMemory {
            place,
            bytes,
            reason: std::io::Error::from(e).to_string(),
        };
        if bytes.0 == 0 {
            return Ok(Self {
                start: NonNull::<u64>::dangling().cast(),
                bytes: 0,
                place,
                high_water: AtomicU64::new(0),
            });
        }
        let length = usize::try_from(bytes.0).map_err(|_| failed(rustix::io::Errno::NOMEM))?;
        // SAFETY: a new anonymous map at an address of the system's choice aliases nothing.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(failed)?;
        if bytes.0 >= HUGE_PAGE {
            // SAFETY: the range is the map just made. The advice only helps; that it is refused does not matter.
            let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        Ok(Self { start, bytes: bytes.0, place, high_water: AtomicU64::new(0) })
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes that an operation is given the bytes up to `end`.
    pub(super) fn reach(&self, end: u64) {
        self.high_water.fetch_max(end, Ordering::Relaxed);
    }

    pub(super) fn high_water(&self) -> u64 {
        self.high_water.load(Ordering::Relaxed)
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the map was made by `new` with this length, and views do not outlive the backend that owns it.
            let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes as usize) };
            debug_assert!(unmapped.is_ok(), "a map of our own can be unmapped");
        }
    }
}
