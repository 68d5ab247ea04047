//! The CUDA backend passes the suite of operations, gives the same bits every run, and orders its lanes by marks.

use gpurun_device::{
    Backend, CpuBackend, CrossEntropy, CudaBackend, DeviceError, Embedding, check_host_link, check_peer_link,
    cuda_device_ids, cuda_gpus, suite,
};
use gpurun_types::{Bytes, DType, Lane, Place, View};

/// A backend on the first GPU; `None`, said aloud, where there is none.
fn backend() -> Option<CudaBackend> {
    match CudaBackend::new(0, 2) {
        Ok(backend) => Some(backend),
        Err(DeviceError::Missing(why)) if std::env::var_os("GPURUN_REQUIRE_GPU").is_none() => {
            eprintln!("skipped: no GPU ({why})");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The suite passes with views aligned to 256 bytes and to their elements only, and the same run gives the same bits.
fn passes(dtype: DType) {
    let Some(backend) = backend() else { return };
    let first = suite::run(&backend, dtype, suite::CASES, false);
    let second = suite::run(&backend, dtype, suite::CASES, false);
    for ((name, want), (_, got)) in first.iter().zip(&second) {
        assert!(want == got, "{name} in {dtype} gives other bits in a second run");
    }
    suite::run(&backend, dtype, suite::CASES, true);
}

#[test]
fn links_of_the_first_gpu_carry_bytes_unharmed() {
    let _limit = testkit::time_limit(120);
    let Some(backend) = backend() else { return };
    let (free, total) = backend.device_memory().expect("the driver tells");
    assert!(free.0 > 0 && free <= total);
    let gpus = cuda_gpus().expect("the driver lists its GPUs");
    assert_eq!(cuda_device_ids().expect("the same"), gpus.iter().map(|gpu| gpu.id).collect::<Vec<_>>());
    assert!(gpus[0].memory >= total && gpus[0].name == backend.name(), "{gpus:?}");
    let link = check_host_link(&backend).expect("bytes come back as they went");
    assert!(link.up > 1e9 && link.down > 1e9, "{link:?}");
    // A second context of the same GPU takes the same way as another GPU.
    let other = CudaBackend::new(gpus.len() as u32 - 1, 1).expect("the last GPU");
    assert!(check_peer_link(&backend, &other).expect("bytes come over as they went").rate > 1e9);
}

#[test]
fn operations_in_fp32() {
    let _limit = testkit::time_limit(120);
    passes(DType::F32);
}

#[test]
fn operations_in_bf16() {
    let _limit = testkit::time_limit(120);
    passes(DType::Bf16);
}

#[test]
fn operations_in_fp16() {
    let _limit = testkit::time_limit(120);
    passes(DType::F16);
}

#[test]
fn operations_of_any_type_give_the_bits_of_the_host() {
    let _limit = testkit::time_limit(120);
    let Some(backend) = backend() else { return };
    let device = suite::run(&backend, DType::F32, suite::ONCE, false);
    let host = suite::run(&CpuBackend::new(2).expect("a backend"), DType::F32, suite::ONCE, false);
    for ((name, got), (_, want)) in device.iter().zip(&host) {
        // A NaN that is rounded to a narrower type stays a NaN, with other bits.
        assert!(*name == "cast" || got == want, "{name} gives other bits than on the host");
    }
}

#[test]
fn adamw_gives_the_bits_of_the_host() {
    let _limit = testkit::time_limit(120);
    let Some(backend) = backend() else { return };
    let host = CpuBackend::new(2).expect("a backend");
    let adamw: Vec<_> = suite::CASES.iter().copied().filter(|(name, _)| name.starts_with("adamw")).collect();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let run = |backend: &dyn Backend| suite::run(backend, dtype, &adamw, false);
        assert!(run(&backend) == run(&host), "AdamW with weights in {dtype}");
    }
}

#[test]
fn lanes_are_ordered_by_marks() {
    let _limit = testkit::time_limit(60);
    let Some(backend) = backend() else { return };
    const LEN: usize = 8 << 20;
    let bytes = DType::F32.bytes(2 * LEN);
    let arenas = [Place::Device, Place::Host].map(|place| backend.allocate(place, bytes).expect("an arena"));
    let [device, host] = arenas.map(|arena| View { arena, offset: 0, len: LEN, dtype: DType::F32 });
    for round in 1..=100 {
        let value = round as f32;
        backend.fill(Lane::Host, host, value).expect("fill");
        let filled = backend.record(Lane::Host).expect("record");
        backend.wait(Lane::CopyIn, filled).expect("wait");
        backend.copy(Lane::CopyIn, host, device).expect("copy");
        let copied = backend.record(Lane::CopyIn).expect("record");
        backend.wait(Lane::Compute, copied).expect("wait");
        backend.add_assign(Lane::Compute, device, View { offset: device.bytes(), ..device }).expect("add");
        let added = backend.record(Lane::Compute).expect("record");
        backend.wait(Lane::CopyOut, added).expect("wait");
        let back = View { offset: host.bytes(), ..host };
        backend.copy(Lane::CopyOut, View { offset: device.bytes(), ..device }, back).expect("copy");
        let down = backend.record(Lane::CopyOut).expect("record");
        assert!(down.number == round && down.lane == Lane::CopyOut);
        backend.wait(Lane::Host, down).expect("wait");
        let mut last = [0; 4];
        backend.download(back.slice(LEN - 1, 1), &mut last).expect("download");
        assert_eq!(f32::from_le_bytes(last), value * (value + 1.0) / 2.0);
        // An old mark has passed.
        backend.wait(Lane::Compute, gpurun_device::Mark { lane: Lane::CopyIn, number: 1 }).expect("wait");
    }
}

#[test]
fn tokens_and_targets_outside_the_vocabulary_are_named() {
    let _limit = testkit::time_limit(60);
    let Some(backend) = backend() else { return };
    let arena = backend.allocate(Place::Device, Bytes(4096)).expect("an arena");
    let view = |offset, len, dtype| View { arena, offset, len, dtype };
    let ints = |offset, values: [i32; 2]| {
        let view = view(offset, 2, DType::I32);
        backend.upload(&values.map(i32::to_le_bytes).concat(), view).expect("upload");
        view
    };
    let args = Embedding {
        tokens: ints(0, [1, 5]),
        starts: ints(256, [0, 0]),
        table: view(512, 5 * 2, DType::F32),
        positions: None,
        seq: 2,
        width: 2,
    };
    let named = || backend.synchronize(Lane::Compute).expect_err("a value out of range").to_string();
    backend.embedding_forward(Lane::Compute, args, view(1024, 4, DType::F32)).expect("enqueued");
    assert_eq!(named(), "embedding failed: token 5 at 1 is not in the vocabulary");
    backend.embedding_backward(Lane::Compute, args, view(1024, 4, DType::F32)).expect("enqueued");
    assert_eq!(named(), "embedding failed: token 5 at 1 is not in the vocabulary");
    let args = CrossEntropy {
        logits: view(512, 6, DType::F32),
        targets: ints(0, [-1, 3]),
        loss: view(1024, 1, DType::F64),
        row_losses: view(1280, 2, DType::F32),
        scale: view(1536, 1, DType::F32),
        factor: 1.0,
        rows: 2,
        vocabulary: 3,
        backward: false,
    };
    backend.cross_entropy(Lane::Compute, args).expect("enqueued");
    assert_eq!(named(), "cross_entropy failed: target 3 of row 1 is not in the vocabulary");
    backend.synchronize(Lane::Compute).expect("a fault is reported once");
}

#[test]
fn too_large_an_arena_is_an_error() {
    let _limit = testkit::time_limit(60);
    let Some(backend) = backend() else { return };
    for place in [Place::Device, Place::Host] {
        let refused = backend.allocate(place, Bytes(1 << 50));
        assert!(matches!(refused, Err(DeviceError::OutOfMemory { .. })), "{place}: {refused:?}");
        assert_eq!(backend.allocated(place), Bytes(0));
    }
}

#[test]
fn a_gpu_that_is_not_there_is_missing() {
    let _limit = testkit::time_limit(60);
    match CudaBackend::new(1000, 1) {
        Err(DeviceError::Missing(why)) => eprintln!("{why}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("there is no GPU 1000"),
    }
}
