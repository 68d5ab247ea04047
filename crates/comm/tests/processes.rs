//! Ranks that are processes: this test program starts itself once for each rank.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpurun_comm::{CommError, Communicator, Fabric, FabricOptions, create_shared_memory};
use gpurun_device::{Backend, CpuBackend};
use gpurun_types::{DType, Place, Rank, View};
use rustix::io::FdFlags;

/// Says in a child which rank it is, of how many, and which descriptor is the memory.
const PART: &str = "GPURUN_COMM_TEST_PART";

/// A rank as a process that runs the test `name` of this program.
fn start(name: &str, fd: &OwnedFd, rank: u32, world: u32) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", name, "--nocapture", "--test-threads", "1"]);
    command.env(PART, format!("{rank} {world} {}", fd.as_raw_fd()));
    command.stdout(Stdio::null()).spawn().expect("a process")
}

/// In a child: its rank, the number of ranks, and its end of the memory.
fn part(timeout: Duration) -> Option<(u32, u32, Arc<Fabric>)> {
    let text = std::env::var(PART).ok()?;
    let mut numbers = text.split(' ').map(|n| n.parse::<u32>().expect("a number"));
    let mut next = || numbers.next().expect("three numbers");
    let (rank, world, fd) = (next(), next(), next());
    let memory = std::fs::File::open(format!("/proc/self/fd/{fd}"));
    // Opened anew for reading and writing: the inherited descriptor belongs to nobody here.
    let memory = memory.and(std::fs::File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}")));
    let fabric = Fabric::process(memory.expect("the memory"), Rank(rank), world, FabricOptions { timeout });
    Some((rank, world, fabric.expect("a fabric")))
}

fn memory(world: u32) -> OwnedFd {
    let fd = create_shared_memory(world).expect("shared memory");
    // Handed down to the children.
    rustix::io::fcntl_setfd(fd.as_fd(), FdFlags::empty()).expect("a flag");
    fd
}

fn sum_of_ranks(rank: u32, world: u32, fabric: &Arc<Fabric>, len: usize, rounds: usize) -> Result<(), CommError> {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(1).expect("a backend"));
    let arena = backend.allocate(Place::Device, DType::F32.bytes(len)).expect("an arena");
    let view = View { arena, offset: 0, len, dtype: DType::F32 };
    let members: Vec<Rank> = (0..world).map(Rank).collect();
    let link = fabric.communicator(0, &members, backend.clone())?;
    for round in 0..rounds {
        let mine = (rank + round as u32) as f32;
        backend.upload(&mine.to_le_bytes().repeat(len), view).expect("an upload");
        link.all_reduce(view)?;
        let want = (0..world).map(|r| (r + round as u32) as f32).sum::<f32>();
        let mut bytes = vec![0; 4 * len];
        backend.download(view, &mut bytes).expect("a download");
        assert!(bytes.chunks_exact(4).all(|b| b == want.to_le_bytes()), "rank {rank}, round {round}");
    }
    Ok(())
}

#[test]
fn processes_sum() {
    let _limit = testkit::time_limit(60);
    if let Some((rank, world, fabric)) = part(Duration::from_secs(40)) {
        sum_of_ranks(rank, world, &fabric, 300_007, 5).expect("sums");
        return;
    }
    for world in [2, 3, 4] {
        let fd = memory(world);
        let children: Vec<Child> = (0..world).map(|r| start("processes_sum", &fd, r, world)).collect();
        for mut child in children {
            assert!(child.wait().expect("a child").success());
        }
    }
}

#[test]
fn a_killed_process_is_lost_to_the_others() {
    let _limit = testkit::time_limit(60);
    if let Some((rank, world, fabric)) = part(Duration::from_secs(40)) {
        // Goes on until a peer dies; then says so by its exit code.
        let error = sum_of_ranks(rank, world, &fabric, 50_000, usize::MAX).expect_err("rank 1 is killed");
        assert!(matches!(error, CommError::PeerLost { .. }), "{error}");
        std::process::exit(17);
    }
    let fd = memory(3);
    let mut children: Vec<Child> = (0..3).map(|r| start("a_killed_process_is_lost_to_the_others", &fd, r, 3)).collect();
    // Watches from outside: payload in the memory means that sums are under way.
    while rustix::fs::fstat(&fd).expect("a file").st_blocks < 800 {
        std::thread::yield_now();
    }
    children[1].kill().expect("killed");
    let killed = Instant::now();
    for rank in [0, 2] {
        assert_eq!(children[rank].wait().expect("a child").code(), Some(17), "rank {rank}");
    }
    assert!(killed.elapsed() < Duration::from_secs(5), "the others leave at once");
    children[1].wait().expect("a child");
}
