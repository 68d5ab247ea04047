//! The CPU backend passes the suite of operations, and gives the same bits on any number of threads.

use gpurun_device::{Backend, CpuBackend, CpuSizes, DeviceError, ScratchSizes, host_rates, suite};
use gpurun_types::{Bytes, DType, Place, View};

/// The suite passes on one, two and three threads, with views aligned to 256 bytes and to their elements only, and every run
/// gives the same bits.
fn passes(dtype: DType) {
    let run = |threads, skewed| suite::run(&CpuBackend::new(threads).expect("a backend"), dtype, suite::CASES, skewed);
    let alone = run(1, false);
    for (threads, skewed) in [(2, false), (3, true)] {
        for ((name, want), (_, got)) in alone.iter().zip(run(threads, skewed)) {
            assert!(*want == got, "{name} in {dtype} gives other bits on {threads} threads, skewed {skewed}");
        }
    }
}

#[test]
fn operations_in_fp32() {
    let _limit = testkit::time_limit(60);
    passes(DType::F32);
}

#[test]
fn operations_in_bf16() {
    let _limit = testkit::time_limit(60);
    passes(DType::Bf16);
}

#[test]
fn operations_in_fp16() {
    let _limit = testkit::time_limit(60);
    passes(DType::F16);
}

#[test]
fn operations_of_any_type() {
    let _limit = testkit::time_limit(60);
    let run = |threads| suite::run(&CpuBackend::new(threads).expect("a backend"), DType::F32, suite::ONCE, false);
    assert!(run(1) == run(3), "other bits on three threads than on one");
}

/// Threads cut a product differently; no element may notice. `k` is above 512, where sums are taken in blocks.
#[test]
fn products_have_the_same_bits_on_any_number_of_threads() {
    use gpurun_device::Matmul;
    use gpurun_types::Lane;
    let _limit = testkit::time_limit(60);
    let product = |threads: usize, [m, n, k]: [usize; 3], transpose_a: bool, transpose_b: bool| {
        let backend = CpuBackend::new(threads).expect("a backend");
        let place = |len: usize| {
            let bytes = DType::F32.bytes(len);
            let arena = backend.allocate(Place::Device, bytes).expect("an arena");
            View { arena, offset: 0, len, dtype: DType::F32 }
        };
        let put = |len: usize, seed: u32| {
            let view = place(len);
            let value =
                |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / (1 << 24) as f32 - 0.5;
            let bytes: Vec<u8> = (0..len as u32).flat_map(|i| value(i).to_le_bytes()).collect();
            backend.upload(&bytes, view).expect("upload");
            view
        };
        let (a, b, d) = (put(m * k, 1), put(k * n, 2), place(m * n));
        let args = Matmul { a, b, d, m, n, k, transpose_a, transpose_b, bias: None, residual: None, accumulate: false };
        backend.matmul(Lane::Compute, args).expect("a product");
        let mut bytes = vec![0; m * n * 4];
        backend.download(d, &mut bytes).expect("download");
        bytes
    };
    for size in [[300, 500, 1100], [1, 5000, 1030], [1200, 130, 530], [195, 259, 2048]] {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let alone = product(1, size, ta, tb);
            for threads in [2, 3, 5, 8] {
                assert!(alone == product(threads, size, ta, tb), "{size:?} {ta} {tb}: other bits on {threads} threads");
            }
        }
    }
}

#[test]
fn lanes_may_work_at_the_same_time() {
    let _limit = testkit::time_limit(60);
    let cases = &suite::CASES[..6];
    let backend = CpuBackend::new(2).expect("a backend");
    let alone = suite::run(&backend, DType::Bf16, cases, false);
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..3).map(|_| scope.spawn(|| suite::run(&backend, DType::Bf16, cases, false))).collect();
        for lane in lanes {
            assert!(lane.join().expect("the lane passes the suite") == alone, "other bits beside other lanes");
        }
    });
}

/// A step of AdamW that sets `m` to the gradient and `v` to its square, rounded to bf16: the moments after it.
fn rounded_moments(backend: &CpuBackend, grad: &[f32], step: f32) -> [Vec<f64>; 2] {
    use gpurun_device::{AdamRun, AdamW, RoundingKey, ScalarSlot};
    use gpurun_types::Lane;
    let len = grad.len();
    let arena = backend.allocate(Place::Host, Bytes(12 * len as u64 + 256)).expect("an arena");
    let view = |offset: usize, len, dtype| View { arena, offset: offset as u64, len, dtype };
    let mut scalars = [0f32; ScalarSlot::COUNT];
    for (slot, value) in [
        (ScalarSlot::AdamSteps, step),
        (ScalarSlot::GradFactor, 1.0),
        (ScalarSlot::BiasCorrection1, 1.0),
        (ScalarSlot::BiasCorrection2Sqrt, 1.0),
    ] {
        scalars[slot as usize] = value;
    }
    let state = view(0, ScalarSlot::COUNT, DType::F32);
    backend.upload(&scalars.map(f32::to_le_bytes).concat(), state).expect("upload");
    let run = AdamRun {
        master: view(256, len, DType::F32),
        grad: view(256 + 4 * len, len, DType::F32),
        m: view(256 + 8 * len, len, DType::Bf16),
        v: view(256 + 10 * len, len, DType::Bf16),
        weight: None,
        weight_decay: 0.0,
        rounding: RoundingKey::new(3, 1, 0),
    };
    let bytes: Vec<u8> = grad.iter().flat_map(|g| g.to_le_bytes()).collect();
    backend.upload(&bytes, run.grad).expect("upload");
    let args = AdamW { runs: &[run], scalars: state, beta1: 0.0, beta2: 0.0, eps: 1e-8 };
    backend.adamw(Lane::Host, &args).expect("adamw");
    [run.m, run.v].map(|moment| {
        let mut bytes = vec![0; 2 * len];
        backend.download(moment, &mut bytes).expect("download");
        suite::decoded(&bytes, DType::Bf16)
    })
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), v| (sum + v, count + 1.0));
    sum / count
}

#[test]
fn rounding_of_moments_is_unbiased_and_independent() {
    let _limit = testkit::time_limit(60);
    const LEN: usize = 1 << 18;
    // Deviations of a mean of LEN fair draws; of 40 means none should be farther off than 5.
    let bound = 5.0 / (LEN as f64).sqrt();
    let backend = CpuBackend::new(2).expect("a backend");
    for (value, step) in [(1.002f32, 1.0), (-3.1e-5, 2.0), (0.7501, 3.0), (7.77e-12, 1000.0), (2.0, 4.0)] {
        let (grad, square) = (vec![value; LEN], value * value);
        let moments = rounded_moments(&backend, &grad, step);
        let again = rounded_moments(&backend, &grad, step);
        let next = rounded_moments(&backend, &grad, step + 1.0);
        assert!(moments == again, "the same bits for the same step");
        // For each moment: which elements were rounded away from zero, less the share that should be.
        let mut signs = Vec::new();
        for ((values, later), exact) in moments.iter().zip(&next).zip([value, square]) {
            let low = f32::from_bits(exact.to_bits() & 0xffff_0000);
            let high = f32::from_bits(low.to_bits() + 0x1_0000);
            let [low, high, exact] = [low, high, exact].map(f64::from);
            assert!(
                values.iter().all(|v| *v == low || (*v == high && low != exact)),
                "{exact} lies between two values"
            );
            let share = (exact - low) / (high - low);
            let up =
                |values: &[f64]| values.iter().map(|v| f64::from(u8::from(*v == high)) - share).collect::<Vec<_>>();
            let bias = mean(up(values).into_iter());
            assert!(bias.abs() < bound, "{exact} is rounded up {bias:e} too often");
            signs.push(up(values));
            signs.push(up(later));
        }
        // m, m a step later, v, v a step later: of one element and of neighbours.
        for (i, a) in signs.iter().enumerate() {
            for (j, b) in signs.iter().enumerate() {
                for shift in (0..3).filter(|shift| *shift > 0 || i != j) {
                    let product = mean(a.iter().zip(&b[shift..]).map(|(a, b)| a * b));
                    assert!(product.abs() < bound, "{value}: {i} and {j} at distance {shift} go together: {product:e}");
                }
            }
        }
    }
}

#[test]
fn arenas_are_aligned_and_addressable() {
    let _limit = testkit::time_limit(10);
    let backend = CpuBackend::new(1).expect("a backend");
    for bytes in [1, 4096, 5 << 20] {
        for place in [Place::Device, Place::Host] {
            let arena = backend.allocate(place, Bytes(bytes)).expect("an arena");
            let view = View { arena, offset: 0, len: 1, dtype: DType::F32 };
            let byte = View { len: 0, ..view };
            let pointer = backend.host_pointer(if bytes == 1 { byte } else { view }).expect("host memory");
            assert!((pointer as usize).is_multiple_of(256));
        }
    }
}

#[test]
fn too_large_an_arena_is_an_error() {
    let _limit = testkit::time_limit(10);
    let backend = CpuBackend::new(1).expect("a backend");
    for bytes in [1 << 50, u64::MAX] {
        match backend.allocate(Place::Host, Bytes(bytes)) {
            Err(DeviceError::OutOfMemory { place: Place::Host, bytes: named, .. }) => assert_eq!(named, Bytes(bytes)),
            other => panic!("{bytes} bytes gave {other:?}"),
        }
    }
    assert_eq!(backend.allocated(Place::Host), Bytes(0));
}

#[test]
fn tokens_and_targets_outside_the_vocabulary_are_named() {
    use gpurun_device::{CrossEntropy, Embedding};
    use gpurun_types::Lane;
    let _limit = testkit::time_limit(10);
    let backend = CpuBackend::new(1).expect("a backend");
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
    let error = backend.embedding_forward(Lane::Compute, args, view(1024, 4, DType::F32)).expect_err("token 5 of 5");
    assert_eq!(error.to_string(), "embedding_forward failed: token 5 at 1 is not below 5");
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
    let error = backend.cross_entropy(Lane::Compute, args).expect_err("target 3 of 3");
    assert_eq!(error.to_string(), "cross_entropy failed: target 3 of row 1 is not below 3");
}

#[test]
fn sizes_need_no_backend() {
    let _limit = testkit::time_limit(10);
    let backend = CpuBackend::new(2).expect("a backend");
    for (rows, width) in [(1, 1), (37, 33), (5000, 768)] {
        assert_eq!(CpuSizes.norm_backward_scratch(rows, width), backend.norm_backward_scratch(rows, width));
    }
}

/// Figures are the machine's; that there are some, and that the memory is given back, is ours.
#[test]
fn rates_are_measured_in_memory_that_is_given_back() {
    let _limit = testkit::time_limit(30);
    let backend = CpuBackend::new(2).expect("a backend");
    for bytes in [0, 1 << 20] {
        let rates = host_rates(&backend, Bytes(bytes)).expect("rates");
        for rate in [rates.to_device, rates.to_host, rates.triad, rates.adam] {
            assert!(rate.is_finite() && rate > 1e6, "{rates:?}");
        }
    }
    assert_eq!([Place::Device, Place::Host].map(|place| backend.allocated(place)), [Bytes(0); 2]);
}
