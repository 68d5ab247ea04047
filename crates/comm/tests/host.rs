//! Collectives and messages between threads and between processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpurun_comm::wrap::{Call, Fault, Faulty, Recording};
use gpurun_comm::{
    CommError, Communicator, Fabric, FabricOptions, HostCommunicator, Solo, abort_shared_memory, create_shared_memory,
};
use gpurun_device::{Backend, CpuBackend};
use gpurun_types::{Bytes, DType, Place, Rank, View};
use half::bf16;
use proptest::prelude::*;

/// Longer than two chunks of any type, and no multiple of anything.
const LONG: usize = 700_001;

struct Member {
    link: Arc<HostCommunicator>,
    backend: Arc<dyn Backend>,
}

impl Member {
    fn new(fabric: &Arc<Fabric>, world: u32, channel: u32) -> Self {
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(1).expect("a backend"));
        let members: Vec<Rank> = (0..world).map(Rank).collect();
        let link = fabric.communicator(channel, &members, backend.clone()).expect("a communicator");
        Self { link: Arc::new(link), backend }
    }

    fn view(&self, len: usize, dtype: DType) -> View {
        let arena = self.backend.allocate(Place::Device, dtype.bytes(len)).expect("an arena");
        View { arena, offset: 0, len, dtype }
    }

    fn put(&self, values: &[f32], dtype: DType) -> View {
        let view = self.view(values.len(), dtype);
        self.write(view, values);
        view
    }

    fn write(&self, view: View, values: &[f32]) {
        let bytes: Vec<u8> = match view.dtype {
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::F64 => values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
            DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            DType::I32 => values.iter().flat_map(|v| (*v as i32).to_le_bytes()).collect(),
        };
        self.backend.upload(&bytes, view).expect("an upload");
    }

    fn get(&self, view: View) -> Vec<f64> {
        let mut bytes = vec![0; view.bytes() as usize];
        self.backend.download(view, &mut bytes).expect("a download");
        let each = bytes.chunks_exact(view.dtype.size());
        match view.dtype {
            DType::F32 => each.map(|b| f32::from_le_bytes(b.try_into().expect("whole")).into()).collect(),
            DType::F64 => each.map(|b| f64::from_le_bytes(b.try_into().expect("whole"))).collect(),
            DType::Bf16 => each.map(|b| bf16::from_le_bytes(b.try_into().expect("whole")).to_f64()).collect(),
            DType::F16 => each.map(|b| half::f16::from_le_bytes(b.try_into().expect("whole")).to_f64()).collect(),
            DType::I32 => each.map(|b| i32::from_le_bytes(b.try_into().expect("whole")).into()).collect(),
        }
    }
}

/// Runs `body` on every rank, in threads.
fn ranks<T: Send>(world: u32, timeout: Duration, body: impl Fn(u32, Arc<Fabric>) -> T + Sync) -> Vec<T> {
    let fabrics = Fabric::threads(world, FabricOptions { timeout });
    std::thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> =
            fabrics.into_iter().enumerate().map(|(r, f)| scope.spawn(move || body(r as u32, f))).collect();
        handles.into_iter().map(|h| h.join().expect("a rank does not panic")).collect()
    })
}

const PATIENT: Duration = Duration::from_secs(50);

/// Values that fp16 holds exactly, different on every rank.
fn value(rank: u32, i: usize) -> f32 {
    ((i * 7 + rank as usize * 31) % 64) as f32 / 8.0 - 3.0
}

fn values(rank: u32, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i)).collect()
}

#[test]
fn collectives_give_the_right_values() {
    let _limit = testkit::time_limit(120);
    for world in 1..=5u32 {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16] {
            for part in [0, 1, 7, 4099, if world == 3 { LONG } else { 0 }] {
                ranks(world, PATIENT, |rank, fabric| {
                    let m = Member::new(&fabric, world, 0);
                    let n = world as usize;
                    let sum = |i| (0..world).map(|r| f64::from(value(r, i))).sum::<f64>();
                    let mine = m.put(&values(rank, part), dtype);
                    let all = m.view(part * n, dtype);
                    m.link.all_gather(mine, all).expect("all-gather");
                    for (i, got) in m.get(all).into_iter().enumerate() {
                        assert_eq!(got, f64::from(value((i / part) as u32, i % part)));
                    }
                    let whole = m.put(&values(rank, part * n), dtype);
                    let shard = m.put(&vec![1.0; part], dtype);
                    m.link.reduce_scatter(whole, shard, true).expect("reduce-scatter");
                    for (i, got) in m.get(shard).into_iter().enumerate() {
                        assert_eq!(got, 1.0 + sum(rank as usize * part + i), "{dtype}, element {i}");
                    }
                    let own = whole.slice(rank as usize * part, part);
                    m.link.reduce_scatter(whole, own, false).expect("reduce-scatter in place");
                    m.link.all_gather(own, whole).expect("all-gather in place");
                    for (i, got) in m.get(whole).into_iter().enumerate() {
                        assert_eq!(got, sum(i), "{dtype}, element {i}");
                    }
                    let buffer = m.put(&values(rank, part), dtype);
                    m.link.all_reduce(buffer).expect("all-reduce");
                    for (i, got) in m.get(buffer).into_iter().enumerate() {
                        assert_eq!(got, sum(i), "{dtype}, element {i}");
                    }
                    m.link.barrier().expect("barrier");
                });
            }
        }
    }
}

#[test]
fn sums_are_added_in_rank_order() {
    let _limit = testkit::time_limit(60);
    for len in [3, 50_000] {
        let got = ranks(4, PATIENT, |rank, fabric| {
            let m = Member::new(&fabric, 4, 3);
            // In fp32, ((1e8 + 1) - 1e8) + 1 = 1, and other orders give 0 or 2.
            let term = [1e8, 1.0, -1e8, 1.0][rank as usize];
            let buffer = m.put(&vec![term; len], DType::F32);
            m.link.all_reduce(buffer).expect("all-reduce");
            m.get(buffer)
        });
        assert!(got.iter().flatten().all(|v| *v == 1.0));
    }
}

#[test]
fn messages_arrive_in_order_both_ways_and_on_many_channels() {
    let _limit = testkit::time_limit(60);
    ranks(3, PATIENT, |rank, fabric| {
        std::thread::scope(|scope| {
            for channel in 0..4 {
                let fabric = fabric.clone();
                scope.spawn(move || {
                    let m = Member::new(&fabric, 3, channel);
                    for (i, len) in [5usize, 0, 100_003, 1].into_iter().enumerate() {
                        let next = (rank as usize + 1) % 3;
                        let before = (rank as usize + 2) % 3;
                        let tag = |r: usize| (r * 100 + i * 10 + channel as usize) as f32;
                        let out = m.put(&vec![tag(rank as usize); len], DType::I32);
                        let back = m.view(len, DType::I32);
                        let (a, b) = (m.link.clone(), m.link.clone());
                        // Larger than the mailbox: both directions at once need two threads, as two lanes are.
                        std::thread::scope(|s| {
                            s.spawn(move || a.send(next, out).expect("send"));
                            b.recv(before, back).expect("recv");
                        });
                        assert!(m.get(back).iter().all(|v| *v == f64::from(tag(before))));
                    }
                });
            }
        });
    });
}

#[test]
fn disagreement_is_named() {
    let _limit = testkit::time_limit(30);
    let errors = ranks(2, PATIENT, |rank, fabric| {
        let m = Member::new(&fabric, 2, 0);
        let buffer = m.put(&vec![1.0; 10 + rank as usize], DType::F32);
        m.link.all_reduce(buffer).expect_err("lengths differ")
    });
    assert!(errors.iter().any(|e| matches!(e, CommError::Mismatch { .. })));
    let text = errors.iter().map(ToString::to_string).collect::<String>();
    assert!(text.contains("all-reduce of 10 fp32") && text.contains("all-reduce of 11 fp32"), "{text}");
    let m = Member::new(&Fabric::threads(1, FabricOptions::default())[0], 1, 0);
    let (two, three) = (m.view(2, DType::F32), m.view(3, DType::F32));
    assert!(matches!(m.link.all_gather(two, three), Err(CommError::Mismatch { .. })));
    let whole = m.view(2, DType::I32);
    assert!(matches!(m.link.all_reduce(whole), Err(CommError::Mismatch { .. })));
    assert!(matches!(m.link.send(0, two), Err(CommError::Mismatch { .. })));
}

#[test]
fn a_peer_that_does_not_come_is_named_when_time_is_up() {
    let _limit = testkit::time_limit(30);
    let over = AtomicBool::new(false);
    let results = ranks(3, Duration::from_millis(300), |rank, fabric| {
        let m = Member::new(&fabric, 3, 0);
        if rank == 2 {
            // Stays alive until the others have given up.
            while !over.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            return None;
        }
        let error = m.link.barrier().expect_err("rank 2 does not come");
        over.store(true, Ordering::SeqCst);
        Some(error)
    });
    for error in results.into_iter().flatten() {
        // The other one may have given up, and left, a moment earlier.
        match error {
            CommError::Timeout { peer, operation, .. } => assert_eq!((peer, operation), (Rank(2), "barrier")),
            CommError::PeerLost { .. } => {}
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_peer_that_left_is_lost_but_what_it_sent_arrives() {
    let _limit = testkit::time_limit(30);
    let results = ranks(2, PATIENT, |rank, fabric| {
        let m = Member::new(&fabric, 2, 0);
        let view = m.put(&[f32::from(rank as u16 + 1)], DType::F32);
        if rank == 1 {
            m.link.send(0, view).expect("send");
            return None;
        }
        m.link.recv(1, view).expect("what was sent before leaving");
        assert_eq!(m.get(view), [2.0]);
        Some((m.link.recv(1, view).expect_err("nothing more comes"), Instant::now()))
    });
    let (error, _) = results[0].as_ref().expect("rank 0 waited");
    assert!(matches!(error, CommError::PeerLost { peer: Rank(1), .. }) && error.is_secondary(), "{error}");
}

#[test]
fn an_abort_ends_every_wait() {
    let _limit = testkit::time_limit(30);
    let errors = ranks(3, PATIENT, |rank, fabric| {
        let m = Member::new(&fabric, 3, 0);
        if rank == 1 {
            m.link.abort("the disk is on fire");
        }
        // Rank 1 does not come: the others wait for it until they see the abort.
        if rank == 1 { None } else { Some(m.link.barrier().expect_err("aborted")) }
    });
    for error in errors.into_iter().flatten() {
        // Rank 1's end is dropped right after, so it may be seen as lost first.
        assert!(error.is_secondary(), "{error}");
    }
    let fd = create_shared_memory(2).expect("shared memory");
    let fabric = Fabric::process(&fd, Rank(0), 2, FabricOptions::default()).expect("a fabric");
    abort_shared_memory(&fd, "from outside").expect("an abort");
    let error = Member::new(&fabric, 2, 0).link.barrier().expect_err("aborted").to_string();
    assert!(error.contains("from outside"), "{error}");
}

#[test]
fn memory_that_is_none_is_refused() {
    let _limit = testkit::time_limit(10);
    assert!(create_shared_memory(0).is_err());
    assert!(create_shared_memory(1000).is_err());
    let file = std::fs::File::open("/proc/self/exe").expect("this program");
    assert!(Fabric::process(&file, Rank(0), 2, FabricOptions::default()).is_err());
    let fd = create_shared_memory(2).expect("shared memory");
    assert!(Fabric::process(&fd, Rank(0), 3, FabricOptions::default()).is_err());
    assert!(Fabric::process(&fd, Rank(2), 2, FabricOptions::default()).is_err());
}

#[test]
fn wrappers_record_and_fail() {
    let _limit = testkit::time_limit(10);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(1).expect("a backend"));
    let arena = backend.allocate(Place::Device, Bytes(64)).expect("an arena");
    let view = View { arena, offset: 0, len: 4, dtype: DType::F32 };
    let solo: Arc<dyn Communicator> = Arc::new(Solo::new(Rank(0), backend));
    let recording = Recording::new(solo.clone());
    recording.all_gather(view, view).expect("a gather of one");
    recording.reduce_scatter(view, view, false).expect("a reduction of one");
    recording.barrier().expect("a barrier of one");
    let calls: Vec<_> = recording.records().iter().map(|r| (r.call, r.elements)).collect();
    assert_eq!(calls, [(Call::AllGather, 4), (Call::ReduceScatter, 4)]);
    let faulty = Faulty::new(solo, Fault::Timeout, 1);
    faulty.barrier().expect("the first call works");
    assert!(matches!(faulty.all_reduce(view), Err(CommError::Timeout { .. })));
    assert!(faulty.barrier().is_err(), "later calls fail too");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_agrees_with_plain_sums(
        world in 2u32..5,
        ops in prop::collection::vec((0u8..4, 0usize..3000), 1..12),
    ) {
        let _limit = testkit::time_limit(60);
        ranks(world, PATIENT, |rank, fabric| {
            let m = Member::new(&fabric, world, 9);
            for (kind, len) in &ops {
                let sum = |i| (0..world).map(|r| f64::from(value(r, i))).sum::<f64>();
                match kind {
                    0 => {
                        let b = m.put(&values(rank, *len), DType::F32);
                        m.link.all_reduce(b).expect("all-reduce");
                        assert!(m.get(b).iter().enumerate().all(|(i, v)| *v == sum(i)));
                    }
                    1 => {
                        let b = m.put(&values(rank, len * world as usize), DType::F32);
                        let s = m.view(*len, DType::F32);
                        m.link.reduce_scatter(b, s, false).expect("reduce-scatter");
                        assert!(m.get(s).iter().enumerate().all(|(i, v)| *v == sum(rank as usize * len + i)));
                    }
                    2 => m.link.barrier().expect("barrier"),
                    _ => {
                        let s = m.put(&values(rank, *len), DType::Bf16);
                        let b = m.view(len * world as usize, DType::Bf16);
                        m.link.all_gather(s, b).expect("all-gather");
                        let want = |i: usize| f64::from(value((i / len) as u32, i % len));
                        assert!(m.get(b).iter().enumerate().all(|(i, v)| *v == want(i)));
                    }
                }
            }
        });
    }
}
