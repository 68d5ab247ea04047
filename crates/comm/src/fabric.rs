//! One rank's hold on the shared memory: who else is there, and how to wait for them.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpurun_device::Backend;
use gpurun_types::Rank;
use rustix::thread::futex;

use crate::CommError;
use crate::host::HostCommunicator;
use crate::region::{CHANNELS, Counter, Region, create_shared_memory};

/// How patient a fabric is.
#[derive(Clone, Copy, Debug)]
pub struct FabricOptions {
    /// How long a wait for a peer may take.
    pub timeout: Duration,
}

impl Default for FabricOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60) }
    }
}

/// How long a wait sleeps before it looks whether its peer still lives.
const SLICE: Duration = Duration::from_millis(20);

/// Looks before a wait sleeps, where every rank has a core of its own.
const SPINS: u32 = 2000;

const HERE: u32 = 1;
const LEFT: u32 = 2;

/// One rank's end of the transport between the ranks of a host, whether they are threads or processes.
pub struct Fabric {
    pub(crate) region: Arc<Region>,
    pub(crate) rank: Rank,
    world: u32,
    options: FabricOptions,
    spins: u32,
}

impl Fabric {
    /// For ranks that are threads of this process: one end each.
    ///
    /// # Panics
    /// When `world` is not 1 to 64, or the system has no memory to share.
    #[must_use]
    pub fn threads(world: u32, options: FabricOptions) -> Vec<Arc<Self>> {
        let fd = create_shared_memory(world).expect("shared memory for the ranks of a test or a small job");
        let region = Arc::new(Region::open(&fd, Some(world)).expect("the region just made"));
        (0..world).map(|rank| Arc::new(Self::join(region.clone(), Rank(rank), world, options))).collect()
    }

    /// For a rank that is a process, over memory of [`create_shared_memory`].
    ///
    /// # Errors
    /// When the descriptor is not such memory, or made for another number of ranks.
    pub fn process(fd: impl AsFd, rank: Rank, world: u32, options: FabricOptions) -> io::Result<Arc<Self>> {
        if rank.0 >= world {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{rank} of {world}")));
        }
        let region = Arc::new(Region::open(fd, Some(world))?);
        Ok(Arc::new(Self::join(region, rank, world, options)))
    }

    fn join(region: Arc<Region>, rank: Rank, world: u32, options: FabricOptions) -> Self {
        let member = &region.header().members[rank.index()];
        let pid = std::process::id();
        member.pid.store(pid, Ordering::Relaxed);
        member.started.store(started(pid).unwrap_or(0), Ordering::Relaxed);
        member.state.store(HERE, Ordering::SeqCst);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if cores >= world as usize { SPINS } else { 1 };
        Self { region, rank, world, options, spins }
    }

    /// A communicator of `members` (global ranks, this one among them) on a channel. All members must ask for it with the
    /// same channel and members; groups that share a channel must not overlap.
    ///
    /// # Errors
    /// When the channel is above 63, or this rank is not among the members.
    pub fn communicator(
        self: &Arc<Self>,
        channel: u32,
        members: &[Rank],
        backend: Arc<dyn Backend>,
    ) -> Result<HostCommunicator, CommError> {
        let refuse = |detail: String| Err(CommError::Mismatch { operation: "communicator", detail });
        if channel >= CHANNELS {
            return refuse(format!("channel {channel}; there are {CHANNELS}"));
        }
        if members.iter().any(|m| m.0 >= self.world) {
            return refuse(format!("members {members:?} of {} ranks", self.world));
        }
        match members.iter().position(|m| *m == self.rank) {
            Some(index) => Ok(HostCommunicator::new(self.clone(), channel, members.to_vec(), index, backend)),
            None => refuse(format!("{} is not among {members:?}", self.rank)),
        }
    }

    /// Makes every wait of every rank fail.
    pub fn abort(&self, reason: &str) {
        self.region.abort(&format!("{}: {reason}", self.rank));
    }

    /// Why the job is given up, once it is.
    pub(crate) fn abort_reason(&self) -> Option<String> {
        self.region.abort_reason()
    }

    /// Sets a counter and wakes who sleeps on it.
    pub(crate) fn set(&self, counter: &Counter, value: u32) {
        counter.value.store(value, Ordering::SeqCst);
        if counter.sleepers.load(Ordering::SeqCst) > 0 {
            // A failed wake only means that a sleeper looks again a little later.
            let _ = futex::wake(&counter.value, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Waits until a counter of `peer` has come to `target`.
    pub(crate) fn wait(
        &self,
        operation: &'static str,
        peer: Rank,
        counter: &Counter,
        target: u32,
    ) -> Result<(), CommError> {
        // Counters wrap, so it is their difference that is compared.
        let there = || counter.value.load(Ordering::SeqCst).wrapping_sub(target) as i32 >= 0;
        for _ in 0..self.spins {
            if there() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let began = Instant::now();
        counter.sleepers.fetch_add(1, Ordering::SeqCst);
        let result = self.sleep(operation, peer, counter, &there, began);
        counter.sleepers.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn sleep(
        &self,
        operation: &'static str,
        peer: Rank,
        counter: &Counter,
        there: &dyn Fn() -> bool,
        began: Instant,
    ) -> Result<(), CommError> {
        let slice = rustix::fs::Timespec { tv_sec: 0, tv_nsec: SLICE.as_nanos() as i64 };
        loop {
            let seen = counter.value.load(Ordering::SeqCst);
            if there() {
                return Ok(());
            }
            // Every way this returns means: look again.
            let _ = futex::wait(&counter.value, futex::Flags::empty(), seen, Some(&slice));
            if there() {
                return Ok(());
            }
            if let Some(reason) = self.region.abort_reason() {
                return Err(CommError::Aborted { operation, reason });
            }
            if !self.lives(peer) {
                // It may have done its part and then left.
                return if there() { Ok(()) } else { Err(CommError::PeerLost { operation, peer }) };
            }
            if began.elapsed() > self.options.timeout {
                return Err(CommError::Timeout { operation, peer, after: self.options.timeout });
            }
        }
    }

    /// False when a peer was here and is gone.
    pub(crate) fn lives(&self, peer: Rank) -> bool {
        let member = &self.region.header().members[peer.index()];
        match member.state.load(Ordering::SeqCst) {
            HERE => {
                let pid = member.pid.load(Ordering::Relaxed);
                pid == std::process::id() || started(pid) == Some(member.started.load(Ordering::Relaxed))
            }
            LEFT => false,
            _ => true,
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.region.header().members[self.rank.index()].state.store(LEFT, Ordering::SeqCst);
    }
}

/// When a process began, in clock ticks since boot; `None` when it is dead. Tells a process from a later one of the same number.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may itself hold spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") { None } else { fields.nth(18)?.parse().ok() }
}
