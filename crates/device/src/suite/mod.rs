//! Operation tests that every backend must pass, in every storage type.
//!
//! Each case makes inputs rounded to the storage type, runs one operation, and compares with a plain fp64 computation of
//! the same inputs. Outputs are poisoned (all bits set: a NaN in every floating type) before the operation, and so is the
//! memory around every view, which must stay as it is. Views go up and down through [`Backend::upload`] and
//! [`Backend::download`] only, so the suite runs on devices that the host cannot address.

mod attention;
mod errors;
mod matrix;
mod memory;
mod optimizer;
mod pointwise;
mod rows;

use std::cell::{Cell, RefCell};

use crate::{Backend, DeviceError};
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};
use half::{bf16, f16};

/// A named test of some operations.
pub type Case = (&'static str, fn(&Cx<'_>));

/// Every case. Those of [`ONCE`] do not depend on the storage type.
pub const CASES: &[Case] = &[
    ("add_assign", pointwise::add_assign),
    ("gelu", pointwise::gelu),
    ("swiglu", pointwise::swiglu),
    ("rope", pointwise::rope),
    ("rope_inverse", pointwise::rope_inverse),
    ("matmul", matrix::matmul),
    ("matmul_large", matrix::matmul_large),
    ("bias_grad", matrix::bias_grad),
    ("embedding_forward", rows::embedding_forward),
    ("embedding_backward", rows::embedding_backward),
    ("norm_forward", rows::norm_forward),
    ("norm_backward", rows::norm_backward),
    ("cross_entropy", rows::cross_entropy),
    ("cross_entropy_extremes", rows::cross_entropy_extremes),
    ("attention_forward", attention::forward),
    ("attention_backward", attention::backward),
    ("adamw", optimizer::adamw),
    ("adamw_cut", optimizer::adamw_cut),
    ("adamw_skip", optimizer::adamw_skip),
    ("shape_errors", errors::shapes),
    ("empty_views", errors::empty),
];

/// Cases that need to run in one storage type only.
pub const ONCE: &[Case] = &[
    ("arenas", memory::arenas),
    ("fill", memory::fill),
    ("copy", memory::copy),
    ("cast", memory::cast),
    ("triad", memory::triad),
    ("norm_partial", optimizer::norm_partial),
    ("step_scalars", optimizer::step_scalars),
    ("loss_scaling", optimizer::loss_scaling),
];

/// Bytes that one case may use.
const ROOM: u64 = 48 << 20;
/// Poisoned bytes before and after each view.
const GUARD: u64 = 256;
const POISON: u8 = 0xff;

/// What a case works with.
pub struct Cx<'a> {
    /// The backend under test.
    pub backend: &'a dyn Backend,
    /// Storage type of activations and weights.
    pub dtype: DType,
    arena: ArenaId,
    skew: u64,
    random: Cell<u64>,
    outputs: RefCell<Vec<u8>>,
}

/// Runs cases one after the other and gives, for each, the bytes of everything it computed, so that a caller can demand
/// equal bits of two runs.
///
/// With `skewed`, views start at odd multiples of their element size instead of multiples of 256 bytes.
pub fn run(backend: &dyn Backend, dtype: DType, cases: &[Case], skewed: bool) -> Vec<(&'static str, Vec<u8>)> {
    let arena = backend.allocate(Place::Device, Bytes(ROOM)).expect("an arena for the suite");
    let mut results = Vec::new();
    for &(name, case) in cases {
        eprintln!("{} {dtype} {name}", backend.name());
        let cx =
            Cx { backend, dtype, arena, skew: u64::from(skewed), random: Cell::new(1), outputs: RefCell::default() };
        case(&cx);
        results.push((name, cx.outputs.into_inner()));
    }
    results
}

impl Cx<'_> {
    /// Views side by side in the suite's arena, until it is dropped.
    pub fn room(&self) -> Room<'_> {
        self.room_in(self.arena)
    }

    /// The same in another arena of at least 48 MiB.
    pub fn room_in(&self, arena: ArenaId) -> Room<'_> {
        Room { cx: self, arena, next: Cell::new(0), views: RefCell::default() }
    }

    /// A pseudo-random number in `0..1` (SplitMix64).
    pub fn uniform(&self) -> f64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A whole number below `bound`.
    pub fn below(&self, bound: usize) -> usize {
        ((self.uniform() * bound as f64) as usize).min(bound - 1)
    }

    /// Normally distributed values of that deviation, rounded to the storage type.
    pub fn normal(&self, len: usize, deviation: f64) -> Vec<f64> {
        self.normal_as(self.dtype, len, deviation)
    }

    /// The same in another type.
    pub fn normal_as(&self, dtype: DType, len: usize, deviation: f64) -> Vec<f64> {
        let values: Vec<f64> = (0..len)
            .map(|_| {
                let (a, b) = (self.uniform().max(1e-300), self.uniform());
                deviation * (-2.0 * a.ln()).sqrt() * (2.0 * std::f64::consts::PI * b).cos()
            })
            .collect();
        rounded(&values, dtype)
    }

    /// First tokens of documents, for `batch` sequences: each is one document, or packed of several.
    pub fn starts(&self, batch: usize, seq: usize) -> Vec<i32> {
        let mut starts = Vec::new();
        for sequence in 0..batch {
            let mut start = 0;
            for i in 0..seq {
                // The first sequence is one document.
                if sequence > 0 && self.below(seq.div_ceil(3)) == 0 {
                    start = i as i32;
                }
                starts.push(start);
            }
        }
        starts
    }

    /// Waits for the device and demands [`near`], with the tolerance of the type that `got` is stored in times `factor`.
    pub fn close(&self, what: &str, room: &Room<'_>, got: View, want: &[f64], factor: f64) {
        let tolerance = factor * unit(got.dtype);
        near(what, &room.get(got), want, tolerance);
    }
}

/// Usual relative tolerance of results in that type: fp32 1e-5 (sums in another order), bf16 6e-3 and fp16 8e-4 (half a unit
/// in the last place is at most 3.9e-3 and 4.9e-4, and a value may be rounded twice).
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 6e-3,
        DType::F16 => 8e-4,
        _ => 1e-5,
    }
}

/// Demands `‖got - want‖ <= tolerance * ‖terms‖`, where `terms` are the sums of the magnitudes of what each element is the sum
/// of, and the same of each element within a factor of 2.
pub fn near_terms(what: &str, got: &[f64], want: &[f64], terms: &[f64], tolerance: f64) {
    assert!(got.len() == want.len() && got.len() == terms.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let (size, error) = (norm(&mut terms.iter().copied()), norm(&mut got.iter().zip(want).map(|(g, w)| g - w)));
    assert!(error <= tolerance * size + 1e-30, "{what}: error {error:e} beside terms of {size:e}: above {tolerance:e}");
    let usual = size / (want.len().max(1) as f64).sqrt();
    for (i, ((g, w), t)) in got.iter().zip(want).zip(terms).enumerate() {
        let allowed = 2.0 * tolerance * (t + usual) + 1e-30;
        assert!((g - w).abs() <= allowed, "{what}: element {i} is {g}, wanted {w}, a sum of terms of {t}");
    }
}

/// Demands `‖got - want‖ <= tolerance * ‖want‖`, and that no single element is far off.
pub fn near(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let size = norm(&mut want.iter().copied());
    let error = norm(&mut got.iter().zip(want).map(|(g, w)| g - w));
    assert!(
        error <= tolerance * size + 1e-30,
        "{what}: relative error {:e} is above {tolerance:e}; first values {:?}, wanted {:?}",
        error / size,
        &got[..got.len().min(8)],
        &want[..want.len().min(8)]
    );
    let usual = size / (want.len().max(1) as f64).sqrt();
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let allowed = 20.0 * tolerance * (w.abs() + usual) + 1e-30;
        assert!((g - w).abs() <= allowed, "{what}: element {i} is {g}, wanted {w}");
    }
}

/// Poisoned views of one arena, with poisoned memory around them.
pub struct Room<'a> {
    cx: &'a Cx<'a>,
    arena: ArenaId,
    next: Cell<u64>,
    views: RefCell<Vec<View>>,
}

impl Room<'_> {
    /// An output: every byte is poison.
    pub fn blank_as(&self, dtype: DType, len: usize) -> View {
        let size = dtype.size() as u64;
        let offset = self.next.get() + GUARD + self.cx.skew * size;
        let view = View { arena: self.arena, offset, len, dtype };
        let end = (offset + view.bytes()).next_multiple_of(256) + GUARD;
        assert!(end <= ROOM, "the case needs more than its room");
        let around = self.bytes(self.next.get(), end);
        self.cx.backend.upload(&vec![POISON; around.bytes() as usize], around).expect("upload");
        self.next.set(end);
        self.views.borrow_mut().push(view);
        view
    }

    /// An output of the storage type.
    pub fn blank(&self, len: usize) -> View {
        self.blank_as(self.cx.dtype, len)
    }

    /// An input of that type.
    pub fn put_as(&self, dtype: DType, values: &[f64]) -> View {
        let view = self.blank_as(dtype, values.len());
        self.set(view, values);
        view
    }

    /// An input of the storage type.
    pub fn put(&self, values: &[f64]) -> View {
        self.put_as(self.cx.dtype, values)
    }

    /// An input of whole numbers.
    pub fn ints(&self, values: &[i32]) -> View {
        let values: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
        self.put_as(DType::I32, &values)
    }

    /// Overwrites a view.
    pub fn set(&self, view: View, values: &[f64]) {
        self.cx.backend.upload(&encoded(values, view.dtype), view).expect("upload");
    }

    /// Waits for the device and reads a view; its bytes count as output of the case.
    pub fn get(&self, view: View) -> Vec<f64> {
        decoded(&self.get_bytes(view), view.dtype)
    }

    /// The same as bytes.
    pub fn get_bytes(&self, view: View) -> Vec<u8> {
        for lane in [Lane::Compute, Lane::Host, Lane::CopyIn, Lane::CopyOut] {
            self.cx.backend.synchronize(lane).expect("the operation succeeds");
        }
        let mut bytes = vec![0; view.bytes() as usize];
        self.cx.backend.download(view, &mut bytes).expect("download");
        self.cx.outputs.borrow_mut().extend_from_slice(&bytes);
        bytes
    }

    /// A scratch view of that many bytes.
    pub fn scratch(&self, bytes: Bytes) -> View {
        self.blank_as(DType::F32, bytes.0.div_ceil(4) as usize)
    }

    /// Raw bytes of the arena. There is no one-byte type; every view has an even number of bytes.
    fn bytes(&self, from: u64, to: u64) -> View {
        View { arena: self.arena, offset: from, len: (to - from) as usize / 2, dtype: DType::F16 }
    }

    fn check_guard(&self, from: u64, to: u64) {
        let view = self.bytes(from, to);
        let mut bytes = vec![0; view.bytes() as usize];
        self.cx.backend.download(view, &mut bytes).expect("download");
        assert!(bytes.iter().all(|b| *b == POISON), "bytes outside the views were written, between {from} and {to}");
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let mut end = 0;
        for view in self.views.borrow().iter() {
            self.check_guard(end, view.offset);
            end = view.offset + view.bytes();
        }
        self.check_guard(end, self.next.get());
    }
}

/// Little-endian bytes of values in that type.
pub fn encoded(values: &[f64], dtype: DType) -> Vec<u8> {
    let each = |f: &dyn Fn(f64) -> Vec<u8>| values.iter().flat_map(|v| f(*v)).collect();
    match dtype {
        DType::F32 => each(&|v| (v as f32).to_le_bytes().to_vec()),
        DType::Bf16 => each(&|v| bf16::from_f32(v as f32).to_le_bytes().to_vec()),
        DType::F16 => each(&|v| f16::from_f32(v as f32).to_le_bytes().to_vec()),
        DType::I32 => each(&|v| (v as i32).to_le_bytes().to_vec()),
        DType::F64 => each(&|v| v.to_le_bytes().to_vec()),
    }
}

/// The values of such bytes.
pub fn decoded(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let value = |b: &[u8]| match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(b.try_into().expect("4 bytes"))),
        DType::Bf16 => bf16::from_le_bytes(b.try_into().expect("2 bytes")).to_f64(),
        DType::F16 => f16::from_le_bytes(b.try_into().expect("2 bytes")).to_f64(),
        DType::I32 => f64::from(i32::from_le_bytes(b.try_into().expect("4 bytes"))),
        DType::F64 => f64::from_le_bytes(b.try_into().expect("8 bytes")),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

/// Values rounded to a type.
pub fn rounded(values: &[f64], dtype: DType) -> Vec<f64> {
    decoded(&encoded(values, dtype), dtype)
}

/// Demands a [`DeviceError::Shape`] that names the operation.
pub fn refused(operation: &str, result: Result<(), DeviceError>) {
    match result {
        Err(DeviceError::Shape { operation: named, .. }) => assert_eq!(named, operation),
        other => panic!("{operation} must refuse its views, not answer {other:?}"),
    }
}
