//! Through pinned host memory comes what comes straight from memory that the host addresses, to the bit.

use std::sync::Arc;

use gpurun_comm::{Communicator, Fabric, FabricOptions, StagedCommunicator};
use gpurun_device::{Backend, CpuBackend};
use gpurun_types::{DType, Lane, Place, Rank, View};

/// Two ways to the same ranks, over one backend.
struct Both {
    backend: Arc<dyn Backend>,
    links: [Arc<dyn Communicator>; 2],
}

impl Both {
    fn new(fabric: &Arc<Fabric>, world: u32) -> Self {
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(1).expect("a backend"));
        let members: Vec<Rank> = (0..world).map(Rank).collect();
        let host = |channel| fabric.communicator(channel, &members, backend.clone()).expect("a communicator");
        let staged = StagedCommunicator::new(host(1), Lane::Reduce, backend.clone()).expect("host memory");
        Self { links: [Arc::new(host(0)), Arc::new(staged)], backend }
    }

    fn put(&self, seed: u64, len: usize, dtype: DType) -> View {
        let arena = self.backend.allocate(Place::Device, dtype.bytes(len)).expect("an arena");
        let view = View { arena, offset: 0, len, dtype };
        let values = (0..len as u64).map(|i| ((i * 37 + seed * 101) % 1009) as f32 / 7.0 - 70.0);
        let bytes: Vec<u8> = match dtype {
            DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
            DType::F64 => values.flat_map(|v| f64::from(v).to_le_bytes()).collect(),
            _ => values.flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        };
        self.backend.upload(&bytes, view).expect("an upload");
        view
    }

    fn get(&self, view: View) -> Vec<u8> {
        let mut bytes = vec![0; view.bytes() as usize];
        self.backend.download(view, &mut bytes).expect("a download");
        bytes
    }

    /// Runs `body` the two ways and compares the bytes that it leaves.
    fn same(&self, what: &str, body: impl Fn(&dyn Communicator) -> View) {
        let [a, b] = [0, 1].map(|way| self.get(body(self.links[way].as_ref())));
        assert!(a == b, "{what} differs");
        assert!(a.iter().any(|byte| *byte != 0), "{what} is not nothing");
    }
}

fn compare(both: &Both, rank: u32, world: u32, part: usize, dtype: DType) {
    let (n, me) = (world as usize, rank as usize);
    let seed = u64::from(rank) + 1;
    both.same("all-gather", |link| {
        let (src, dst) = (both.put(seed, part, dtype), both.put(0, n * part, dtype));
        link.all_gather(src, dst).expect("an all-gather");
        dst
    });
    both.same("all-gather in place", |link| {
        let dst = both.put(seed, n * part, dtype);
        link.all_gather(dst.slice(me * part, part), dst).expect("an all-gather");
        dst
    });
    both.same("all-reduce", |link| {
        let buffer = both.put(seed, part, dtype);
        link.all_reduce(buffer).expect("an all-reduce");
        buffer
    });
    for accumulate in [false, true] {
        both.same("reduce-scatter", |link| {
            let (src, dst) = (both.put(seed, n * part, dtype), both.put(seed + 9, part, dtype));
            link.reduce_scatter(src, dst, accumulate).expect("a reduce-scatter");
            dst
        });
    }
    both.same("a message", |link| {
        let buffer = both.put(seed, part, dtype);
        // Even ranks send first.
        let (next, before) = ((me + 1) % n, (me + n - 1) % n);
        let got = both.put(0, part, dtype);
        if me.is_multiple_of(2) {
            link.send(next, buffer).expect("a send");
            link.recv(before, got).expect("a receive");
        } else {
            link.recv(before, got).expect("a receive");
            link.send(next, buffer).expect("a send");
        }
        link.barrier().expect("a barrier");
        got
    });
}

#[test]
fn staged_collectives_give_the_bits_of_direct_ones() {
    let _limit = testkit::time_limit(60);
    for world in [2, 3] {
        let fabrics = Fabric::threads(world, FabricOptions::default());
        std::thread::scope(|scope| {
            for (rank, fabric) in fabrics.into_iter().enumerate() {
                scope.spawn(move || {
                    let both = Both::new(&fabric, world);
                    // One chunk and several, and no multiple of anything.
                    for (part, dtype) in
                        [(1, DType::F32), (1_500_003, DType::F32), (5_001, DType::F64), (70_001, DType::Bf16)]
                    {
                        compare(&both, rank as u32, world, part, dtype);
                    }
                });
            }
        });
    }
}
