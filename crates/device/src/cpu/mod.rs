//! The CPU backend: fp32 arithmetic over fp32, bf16 or fp16 storage, on a thread pool of its own.
//!
//! Results do not depend on the number of threads: work is cut into pieces whose bounds depend on sizes only, and partial
//! sums are combined in the order of the pieces.

mod adam;
mod arena;
mod attention;
mod backend;
mod element;
mod embedding;
mod kernels;
mod loss;
mod matmul;
mod norm;
mod norm_kernels;
mod optimizer;
mod pointwise;
mod pool;
mod rope;
mod triad;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use gpurun_types::{Bytes, DType, Place, View};

use crate::{AttentionShape, DeviceError, ScratchSizes};
use arena::Arena;

pub(crate) type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Operations on the processor.
pub struct CpuBackend {
    threads: usize,
    pool: pool::Pool,
    arenas: RwLock<Vec<Arena>>,
    spare: Mutex<Vec<Vec<f32>>>,
    angles: Mutex<Vec<Arc<rope::Angles>>>,
    sealed: AtomicBool,
}

/// How far an arena of the CPU backend has been used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaUse {
    /// Whose memory it stands for.
    pub place: Place,
    /// Its size.
    pub bytes: Bytes,
    /// Behind the last byte that any operation, upload or download was given.
    pub high_water: Bytes,
}

/// Fewest elements that are worth a piece of their own.
const GRAIN: usize = 16 * 1024;

/// Smallest size of a page.
const PAGE: usize = 4096;
/// Bytes that a thread brings in at a time: some huge pages.
const TOUCH: usize = 16 << 20;

impl CpuBackend {
    /// A backend that computes on `threads` threads (at least one).
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = threads.max(1);
        let pool = pool::Pool::new(threads)
            .map_err(|e| DeviceError::Failed { operation: "starting threads".into(), reason: e.to_string() })?;
        Ok(Self {
            threads,
            pool,
            arenas: RwLock::default(),
            spare: Mutex::default(),
            angles: Mutex::default(),
            sealed: AtomicBool::new(false),
        })
    }

    /// From now on an allocation is an error: for tests of those who promise to need none.
    pub fn seal(&self) {
        self.sealed.store(true, Ordering::Relaxed);
    }

    /// Every arena that has not been released, and how far it has been used.
    #[must_use]
    pub fn arenas_used(&self) -> Vec<ArenaUse> {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        let used =
            |a: &Arena| ArenaUse { place: a.place(), bytes: Bytes(a.bytes()), high_water: Bytes(a.high_water()) };
        arenas.iter().filter(|a| a.bytes() > 0).map(used).collect()
    }

    /// Runs `body` on pieces of `0..items` of about `grain` items, in parallel. The pieces depend on the sizes only.
    fn pieces(&self, items: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        let count = items.div_ceil(grain);
        let piece = |i: usize| i * grain..((i + 1) * grain).min(items);
        self.pool.run(count, &|i| body(piece(i)));
    }

    /// Runs `body` on pieces of `rows` rows of `width` elements each.
    fn rows(&self, rows: usize, width: usize, body: impl Fn(Range<usize>) + Sync) {
        self.pieces(rows, (GRAIN / width.max(1)).max(1), body);
    }

    /// A buffer of at least `len` elements, contents unknown, that goes back when it is done with.
    fn borrow(&self, len: usize) -> Spare<'_> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let best = spare.iter().enumerate().filter(|(_, b)| b.len() >= len).min_by_key(|(_, b)| b.len());
        let buffer = match best.map(|(i, _)| i) {
            Some(index) => spare.swap_remove(index),
            None => {
                drop(spare);
                vec![0.0; len.next_power_of_two()]
            }
        };
        Spare { backend: self, buffer }
    }

    /// Brings all pages of a new arena in, on all threads: the kernel clears tens of gigabytes in seconds that way, which at first
    /// use would fall to whoever comes by.
    fn touch(&self, arena: &Arena) {
        let start = Shared(arena.start(), arena.bytes() as usize);
        self.pieces(arena.bytes() as usize, TOUCH, |piece| {
            // A small page at a time; a huge one comes whole with the first.
            for page in piece.step_by(PAGE) {
                // SAFETY: within the arena, which nobody else knows yet.
                unsafe { start.from(page).0.write_volatile(0) };
            }
        });
    }

    /// Checks that views lie within their arenas, aligned to their elements.
    fn check(&self, operation: &'static str, views: impl IntoIterator<Item = View>) -> Result {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        for view in views {
            let Some(arena) = arenas.get(view.arena.0 as usize) else {
                return Err(shape(operation, format!("there is no arena {}", view.arena.0)));
            };
            let View { offset, len, dtype, .. } = view;
            let end = (len as u64).checked_mul(dtype.size() as u64).and_then(|bytes| bytes.checked_add(offset));
            if end.is_none_or(|end| end > arena.bytes()) {
                let room = Bytes(arena.bytes());
                return Err(shape(operation, format!("{len} {dtype} at byte {offset} leave their arena of {room}")));
            }
            if !offset.is_multiple_of(dtype.size() as u64) {
                return Err(shape(operation, format!("{dtype} at byte {offset} are not aligned to their size")));
            }
        }
        Ok(())
    }

    /// The address of a view; `check` has been passed, or this panics.
    fn pointer(&self, view: View) -> *mut u8 {
        let arenas = self.arenas.read().unwrap_or_else(PoisonError::into_inner);
        let arena = &arenas[view.arena.0 as usize];
        assert!(view.offset + view.bytes() <= arena.bytes(), "{view:?} leaves its arena");
        assert!(view.offset.is_multiple_of(view.dtype.size() as u64), "{view:?} is not aligned");
        arena.reach(view.offset + view.bytes());
        // SAFETY: the offset lies within the arena, or is its end for an empty view.
        unsafe { arena.start().add(view.offset as usize) }
    }

    /// The elements of a view.
    fn read<T: element::Stored>(&self, view: View) -> &[T] {
        assert_eq!(view.dtype, T::DTYPE);
        // SAFETY: `pointer` checked bounds and alignment; arenas live as long as the backend and any bytes are a `T`; the
        // plan's verifier proves that nobody writes these bytes while this operation runs (see `Backend`).
        unsafe { std::slice::from_raw_parts(self.pointer(view).cast(), view.len) }
    }

    /// The elements of a view, to be written.
    #[allow(clippy::mut_from_ref)] // interior mutability: an arena is a cell that the plan shares out
    fn write<T: element::Stored>(&self, view: View) -> &mut [T] {
        assert_eq!(view.dtype, T::DTYPE);
        // SAFETY: as in `read`, and the plan's verifier proves that nobody else touches these bytes while this operation
        // runs. Operations whose arguments may name one view twice (dx over dy) never hold two slices of it at once.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(view).cast(), view.len) }
    }

    /// The elements of a view that pieces of work take disjoint parts of. Unlike `write`, this makes no slice of the whole.
    fn shared<T: element::Stored>(&self, view: View) -> Shared<T> {
        assert_eq!(view.dtype, T::DTYPE);
        Shared(self.pointer(view).cast(), view.len)
    }
}

/// A borrowed buffer.
struct Spare<'a> {
    backend: &'a CpuBackend,
    buffer: Vec<f32>,
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        let mut spare = self.backend.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(std::mem::take(&mut self.buffer));
    }
}

/// A pointer to the start of a slice that pieces of work write disjoint parts of.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T, usize);

// SAFETY: `part` is only called with disjoint ranges by concurrent pieces, which `pieces` hands out.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr(), slice.len())
    }

    /// What begins at element `start`.
    fn from(self, start: usize) -> Self {
        assert!(start <= self.1);
        // SAFETY: in bounds.
        Self(unsafe { self.0.add(start) }, self.1 - start)
    }

    /// Elements `range`, to be read. No piece of work may write them at that time.
    fn get(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: in bounds, and not written meanwhile by the contract above.
        unsafe { std::slice::from_raw_parts(self.0.add(range.start), range.len()) }
    }

    /// Elements `range`. Concurrent callers must ask for disjoint ranges.
    #[allow(clippy::mut_from_ref)]
    fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: in bounds, and disjoint from what other pieces ask for by the contract above.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

/// `Err` that names what does not fit.
fn shape(operation: &'static str, detail: impl Into<String>) -> DeviceError {
    DeviceError::Shape { operation, detail: detail.into() }
}

/// Checks a view's length.
fn length(operation: &'static str, name: &str, view: View, len: usize) -> Result {
    if view.len == len {
        return Ok(());
    }
    Err(shape(operation, format!("{name} has {} elements, {len} are needed", view.len)))
}

/// Checks a view's element type.
fn typed(operation: &'static str, name: &str, view: View, dtype: DType) -> Result {
    if view.dtype == dtype {
        return Ok(());
    }
    Err(shape(operation, format!("{name} is {}, {dtype} is needed", view.dtype)))
}

/// Checks both.
fn is(operation: &'static str, name: &str, view: View, dtype: DType, len: usize) -> Result {
    typed(operation, name, view, dtype)?;
    length(operation, name, view, len)
}

/// Checks that a view holds a floating type that models compute in.
fn float(operation: &'static str, name: &str, view: View) -> Result {
    match view.dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(()),
        other => Err(shape(operation, format!("{name} is {other}, a floating type is needed"))),
    }
}

/// Scratch sizes of the CPU backend, where there is no backend at hand.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuSizes;

impl ScratchSizes for CpuSizes {
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes {
        norm::scratch(rows, width)
    }

    fn attention_scratch(&self, _shape: AttentionShape, _dtype: DType) -> Bytes {
        // Blocks of scores are small and stay in the backend's own buffers.
        Bytes(0)
    }
}

impl ScratchSizes for CpuBackend {
    fn norm_backward_scratch(&self, rows: usize, width: usize) -> Bytes {
        CpuSizes.norm_backward_scratch(rows, width)
    }

    fn attention_scratch(&self, shape: AttentionShape, dtype: DType) -> Bytes {
        CpuSizes.attention_scratch(shape, dtype)
    }
}
