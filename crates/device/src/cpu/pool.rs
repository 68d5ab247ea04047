//! Threads that share the pieces of one operation with the thread that calls it.
//!
//! A general pool would have the caller sleep until a worker wakes it, and would have a large operation wait for a worker that
//! the system is slow to run. Here the caller takes pieces too, workers join when they can, and only those that joined are
//! waited for: between operations of tens of microseconds, waking and waiting are what threads cost.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker looks out for the next operation before it sleeps, and a caller for the last piece.
const SPIN: Duration = Duration::from_micros(30);

type Body<'a> = dyn Fn(usize) + Sync + 'a;

/// A pool of some workers.
pub(super) struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose operation the workers share.
    turn: Mutex<()>,
}

#[derive(Default)]
struct State {
    slot: Mutex<Slot>,
    /// Operations so far: an idle worker looks here for news without taking the lock.
    news: AtomicU64,
    /// Workers sleep here.
    work: Condvar,
    /// A caller whose pieces are all taken sleeps here until the workers are done with theirs.
    done: Condvar,
}

#[derive(Default)]
struct Slot {
    job: Option<Job>,
    /// Workers at the current job.
    joined: usize,
    sleeping: usize,
    stop: bool,
    panic: Option<Box<dyn Any + Send>>,
}

/// The pieces of one operation.
#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    next: *const AtomicUsize,
    count: usize,
}

// SAFETY: what the pointers point to may be shared between threads, and outlives the job: `Pool::run` takes the job away and
// waits for those that joined it before it returns.
unsafe impl Send for Job {}

impl Job {
    /// Takes pieces until there are none.
    fn work(self) {
        // SAFETY: as for `Send`; this is called by `Pool::run` itself or by a worker that joined.
        let (body, next) = unsafe { (&*self.body, &*self.next) };
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= self.count {
                return;
            }
            body(piece);
        }
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut seen = 0;
        loop {
            self.look_out(seen);
            let mut slot = self.lock();
            while self.news.load(Ordering::Relaxed) == seen && !slot.stop {
                slot.sleeping += 1;
                slot = self.work.wait(slot).unwrap_or_else(PoisonError::into_inner);
                slot.sleeping -= 1;
            }
            if slot.stop {
                return;
            }
            seen = self.news.load(Ordering::Relaxed);
            let Some(job) = slot.job else { continue };
            slot.joined += 1;
            drop(slot);
            let outcome = catch_unwind(AssertUnwindSafe(|| job.work()));
            let mut slot = self.lock();
            if let Err(panic) = outcome {
                slot.panic.get_or_insert(panic);
            }
            slot.joined -= 1;
            if slot.joined == 0 {
                self.done.notify_all();
            }
        }
    }

    /// Spins until there is news, for a while.
    fn look_out(&self, seen: u64) {
        let begin = Instant::now();
        while self.news.load(Ordering::Relaxed) == seen && begin.elapsed() < SPIN {
            (0..16).for_each(|_| std::hint::spin_loop());
        }
    }

    /// Takes the job away, so that nobody joins it any more, and waits for those that did.
    fn finish(&self) -> Option<Box<dyn Any + Send>> {
        let mut slot = self.lock();
        slot.job = None;
        let begin = Instant::now();
        while slot.joined > 0 && begin.elapsed() < SPIN {
            drop(slot);
            (0..16).for_each(|_| std::hint::spin_loop());
            slot = self.lock();
        }
        while slot.joined > 0 {
            slot = self.done.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
        slot.panic.take()
    }
}

impl Pool {
    /// A pool for `threads` threads, the caller's among them.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        let mut pool = Self { state: Arc::default(), workers: Vec::new(), turn: Mutex::default() };
        for i in 1..threads {
            let state = Arc::clone(&pool.state);
            let worker = std::thread::Builder::new().name(format!("cpu-{i}")).spawn(move || state.serve())?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Runs `body(0)`, .. `body(count - 1)`, in any order and at the same time.
    ///
    /// When the workers are at another caller's operation, or `body` itself calls this, the caller does all of it.
    ///
    /// # Panics
    /// When a piece does, after all threads have left `body`.
    pub(super) fn run(&self, count: usize, body: &Body<'_>) {
        let turn = match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if turn.is_none() || self.workers.is_empty() || count < 2 {
            return (0..count).for_each(body);
        }
        let next = AtomicUsize::new(0);
        // SAFETY: only the lifetime changes. `finish` below leaves no one with the job before `body` and `next` go.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let job = Job { body, next: &next, count };
        let mut slot = self.state.lock();
        slot.job = Some(job);
        self.state.news.fetch_add(1, Ordering::Relaxed);
        let wake = slot.sleeping.min(count - 1);
        drop(slot);
        (0..wake).for_each(|_| self.state.work.notify_one());
        let outcome = catch_unwind(AssertUnwindSafe(|| job.work()));
        let panic = self.state.finish();
        drop(turn);
        if let Some(panic) = outcome.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.lock().stop = true;
        self.state.news.fetch_add(1, Ordering::Relaxed);
        self.state.work.notify_all();
        for worker in self.workers.drain(..) {
            // Panics of pieces were passed on to the caller; a worker has none of its own.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each_once(pool: &Pool, count: usize) {
        let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        pool.run(count, &|i| {
            hits[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "each of {count} pieces runs once");
    }

    #[test]
    fn every_piece_runs_once() {
        let _limit = testkit::time_limit(30);
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).expect("threads start");
            for count in (0..40).cycle().take(4000) {
                each_once(&pool, count);
            }
        }
    }

    #[test]
    fn callers_at_the_same_time_and_within_a_piece() {
        let _limit = testkit::time_limit(30);
        let pool = Pool::new(3).expect("threads start");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|count| each_once(&pool, count % 20)));
            }
        });
        pool.run(4, &|_| each_once(&pool, 7));
    }

    #[test]
    fn workers_take_part() {
        let _limit = testkit::time_limit(30);
        let pool = Pool::new(3).expect("threads start");
        // Each piece waits for the other two: only three threads at once can finish.
        let barrier = std::sync::Barrier::new(3);
        for _ in 0..100 {
            pool.run(3, &|_| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn a_panic_of_a_piece_reaches_the_caller_and_the_pool_lives_on() {
        let _limit = testkit::time_limit(30);
        let pool = Pool::new(2).expect("threads start");
        for bad in 0..50 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, &|i| {
                    if i == bad {
                        resume_unwind(Box::new("piece"));
                    }
                });
            }));
            assert_eq!(outcome.expect_err("the piece panicked").downcast_ref::<&str>(), Some(&"piece"));
            each_once(&pool, 20);
        }
    }
}
