//! Speed of the communicators over shared memory beside a plain copy of the same bytes.
//!
//! `cargo run --release -p gpurun-comm --example comm_bench [-- RANKS [MIB]]`. Ranks are threads over the memory that
//! processes would share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpurun_comm::{Communicator, Fabric, FabricOptions};
use gpurun_device::{Backend, CpuBackend};
use gpurun_types::{DType, Place, Rank, View};

const REPEATS: usize = 15;

type Collective = (&'static str, fn(&dyn Communicator, View, usize));

const COLLECTIVES: [Collective; 3] = [
    ("all-reduce", |link, all, _| link.all_reduce(all).expect("all-reduce")),
    ("reduce-scatter", |link, all, rank| {
        let part = all.len / link.size();
        link.reduce_scatter(all, all.slice(rank * part, part), false).expect("reduce-scatter");
    }),
    ("all-gather", |link, all, rank| {
        let part = all.len / link.size();
        link.all_gather(all.slice(rank * part, part), all).expect("all-gather");
    }),
];

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn repeated(mut body: impl FnMut()) -> f64 {
    body();
    let times = (0..REPEATS).map(|_| {
        let began = Instant::now();
        body();
        began.elapsed()
    });
    median(times.collect())
}

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let (world, mib) = (args.next().unwrap_or(2), args.next().unwrap_or(64));
    let len = (mib << 20) / 4 / world * world;
    println!("{world} ranks, {mib} MiB of fp32, median of {REPEATS}");
    let source = vec![1u8; len * 4];
    let mut target = vec![0u8; len * 4];
    let copy = repeated(|| target.copy_from_slice(std::hint::black_box(&source)));
    let gb = (len * 4) as f64 / 1e9;
    println!("{:15} {:8.2} ms  {:6.2} GB/s", "memcpy", copy * 1e3, gb / copy);
    let fabrics = Fabric::threads(world as u32, FabricOptions::default());
    let tables: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let handles: Vec<_> =
            fabrics.into_iter().enumerate().map(|(r, f)| scope.spawn(move || rank(r, world, len, &f))).collect();
        handles.into_iter().map(|h| h.join().expect("a rank")).collect()
    });
    for (i, (name, _)) in COLLECTIVES.iter().enumerate() {
        let t = tables[0][i];
        println!("{name:15} {:8.2} ms  {:6.2} GB/s  {:.2} memcpy", t * 1e3, gb / t, t / copy);
    }
    println!("{:15} {:8.2} us", "small all-reduce", tables[0][COLLECTIVES.len()] * 1e6);
}

fn rank(rank: usize, world: usize, len: usize, fabric: &Arc<Fabric>) -> Vec<f64> {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(1).expect("a backend"));
    let arena = backend.allocate(Place::Device, DType::F32.bytes(len)).expect("an arena");
    let all = View { arena, offset: 0, len, dtype: DType::F32 };
    let members: Vec<Rank> = (0..world as u32).map(Rank).collect();
    let link = fabric.communicator(0, &members, backend).expect("a communicator");
    let mut times: Vec<f64> = COLLECTIVES.iter().map(|(_, run)| repeated(|| run(&link, all, rank))).collect();
    times.push(repeated(|| link.all_reduce(all.slice(0, 4)).expect("all-reduce")));
    times
}
