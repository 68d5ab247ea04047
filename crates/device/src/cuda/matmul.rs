//! Matrix products through cuBLASLt.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as driver;
use gpurun_types::{DType, Lane};

use super::check::{float, is, length, shape};
use super::driver::{Launch, arguments, check as driver_check};
use super::{CudaBackend, KernelSource, Result, WORKSPACE, cache};
use crate::{DeviceError, Matmul};

const OP: &str = "matmul";

fn check(call: &str, code: lt::cublasStatus_t) -> Result {
    if code == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: the library gives a string of its own for every code.
    let reason = unsafe { CStr::from_ptr(lt::cublasLtGetStatusString(code)) };
    Err(DeviceError::Failed { operation: call.to_owned(), reason: reason.to_string_lossy().into_owned() })
}

/// The library's handle, and the algorithm for each product met so far.
pub(super) struct Library {
    handle: lt::cublasLtHandle_t,
    plans: Mutex<HashMap<Key, Option<lt::cublasLtMatmulAlgo_t>>>,
}

// SAFETY: the library's handle may be used from several threads at once.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// The context must be current.
    pub fn new() -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library writes a handle to a local.
        check("cublasLtCreate", unsafe { lt::cublasLtCreate(&raw mut handle) })?;
        Ok(Self { handle, plans: Mutex::default() })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and used no more.
        let _ = unsafe { lt::cublasLtDestroy(self.handle) };
    }
}

/// What an algorithm is chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    mnk: [usize; 3],
    turned: [bool; 2],
    inputs: DType,
    output: DType,
    bias: bool,
    added: bool,
    /// Of a, b, c, d: the largest power of two, up to 256, that divides the address.
    alignment: [u32; 4],
}

/// Addresses of one product; `c` is added (it may be `d`), and is `d` where nothing is.
#[derive(Clone, Copy)]
struct Addresses {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    bias: u64,
}

fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn data_type(dtype: DType) -> lt::cudaDataType {
    match dtype {
        DType::Bf16 => lt::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => lt::cudaDataType_t::CUDA_R_16F,
        _ => lt::cudaDataType_t::CUDA_R_32F,
    }
}

/// A product as the library describes it. The library's matrices are column-major, so a row-major `d = a b` is asked for as
/// `d' = b' a'`: operands change places and keep their layout.
struct Descriptors {
    product: lt::cublasLtMatmulDesc_t,
    /// First operand (`b`), second (`a`), result (and what is added).
    layouts: [lt::cublasLtMatrixLayout_t; 3],
}

impl Descriptors {
    fn new(key: &Key, bias: u64) -> Result<Self> {
        let mut this = Self { product: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3] };
        let ([m, n, k], [turn_a, turn_b]) = (key.mnk.map(|x| x as u64), key.turned);
        let rows_columns = [if turn_b { (k, n) } else { (n, k) }, if turn_a { (m, k) } else { (k, m) }, (n, m)];
        let types = [key.inputs, key.inputs, key.output];
        // SAFETY: the library writes handles to fields of `this`, and reads attributes from locals of the sizes given.
        unsafe {
            let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            let scale = lt::cudaDataType_t::CUDA_R_32F;
            check("cublasLtMatmulDescCreate", lt::cublasLtMatmulDescCreate(&raw mut this.product, compute, scale))?;
            for ((layout, dtype), (rows, columns)) in this.layouts.iter_mut().zip(types).zip(rows_columns) {
                let code = lt::cublasLtMatrixLayoutCreate(layout, data_type(dtype), rows, columns, rows as i64);
                check("cublasLtMatrixLayoutCreate", code)?;
            }
            use lt::cublasLtMatmulDescAttributes_t as Attribute;
            // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
            this.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(turn_b))?;
            this.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(turn_a))?;
            if key.bias {
                let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32;
                this.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
                this.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            }
        }
        Ok(this)
    }

    /// # Safety
    /// The attribute has the type of `value`.
    unsafe fn set<V>(&self, attribute: lt::cublasLtMatmulDescAttributes_t, value: &V) -> Result {
        let value: *const V = value;
        // SAFETY: the caller vouches for the type; the descriptor exists.
        let code = unsafe {
            lt::cublasLtMatmulDescSetAttribute(self.product, attribute, value.cast(), std::mem::size_of::<V>())
        };
        check("cublasLtMatmulDescSetAttribute", code)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: handles are ours or null, and are destroyed once.
        unsafe {
            for layout in self.layouts.iter().filter(|l| !l.is_null()) {
                let _ = lt::cublasLtMatrixLayoutDestroy(*layout);
            }
            if !self.product.is_null() {
                let _ = lt::cublasLtMatmulDescDestroy(self.product);
            }
        }
    }
}

/// Limits that an algorithm must keep to.
struct Preference(lt::cublasLtMatmulPreference_t);

impl Preference {
    fn new(key: &Key) -> Result<Self> {
        let mut this = Self(std::ptr::null_mut());
        use lt::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let [a, b, c, d] = key.alignment;
        // SAFETY: the library writes a handle to a local, and reads attributes from locals of the sizes given.
        unsafe {
            check("cublasLtMatmulPreferenceCreate", lt::cublasLtMatmulPreferenceCreate(&raw mut this.0))?;
            this.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
            // Split sums are added up in fp32 and in a fixed order: not in the result, nor in the result's type.
            let schemes = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            this.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes)?;
            this.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b)?;
            this.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a)?;
            this.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c)?;
            this.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d)?;
        }
        Ok(this)
    }

    /// # Safety
    /// The attribute has the type of `value`.
    unsafe fn set<V>(&self, attribute: lt::cublasLtMatmulPreferenceAttributes_t, value: &V) -> Result {
        let value: *const V = value;
        // SAFETY: the caller vouches for the type; the preference exists.
        let code = unsafe {
            lt::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value.cast(), std::mem::size_of::<V>())
        };
        check("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the handle is ours and is destroyed once.
            let _ = unsafe { lt::cublasLtMatmulPreferenceDestroy(self.0) };
        }
    }
}

/// Algorithms that are tried for a large product.
const TRIED: usize = 8;
/// Multiply-adds from which trying pays: the first choice is up to 15 % slower than the best.
const LARGE: usize = 1 << 29;
/// Times that each is run, after once to warm up.
const REPEATS: usize = 5;

impl Library {
    /// The algorithms that the library thinks best, best first; none when it does not take such a product.
    fn candidates(&self, key: &Key, d: &Descriptors) -> Result<Vec<lt::cublasLtMatmulAlgo_t>> {
        let preference = Preference::new(key)?;
        // SAFETY: the results are plain numbers, for which zero is a value.
        let mut found: [lt::cublasLtMatmulHeuristicResult_t; TRIED] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let [b, a, result] = d.layouts;
        // SAFETY: descriptors exist; there is room for the results asked for.
        let code = unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                d.product,
                b,
                a,
                result,
                result,
                preference.0,
                TRIED as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        use lt::cublasStatus_t as Status;
        if code == Status::CUBLAS_STATUS_NOT_SUPPORTED || code == Status::CUBLAS_STATUS_INVALID_VALUE {
            return Ok(Vec::new());
        }
        check("cublasLtMatmulAlgoGetHeuristic", code)?;
        let usable = |r: &&lt::cublasLtMatmulHeuristicResult_t| r.state == Status::CUBLAS_STATUS_SUCCESS;
        Ok(found[..count as usize].iter().filter(usable).map(|r| r.algo).collect())
    }
}

/// Two events that time what lies between them on a stream.
struct Stopwatch([driver::CUevent; 2]);

impl Stopwatch {
    fn new() -> Result<Self> {
        let mut this = Self([std::ptr::null_mut(); 2]);
        for event in &mut this.0 {
            // SAFETY: the driver writes a handle to a field of `this`.
            driver_check("cuEventCreate", unsafe { driver::cuEventCreate(event, 0) })?;
        }
        Ok(this)
    }

    fn mark(&self, which: usize, stream: driver::CUstream) -> Result {
        // SAFETY: event and stream exist.
        driver_check("cuEventRecord", unsafe { driver::cuEventRecord(self.0[which], stream) })
    }

    /// Milliseconds between the marks, when the second has passed.
    fn read(&self) -> Result<f32> {
        let [start, end] = self.0;
        let mut time = 0.0;
        // SAFETY: both events have been recorded; the driver writes to a local.
        unsafe {
            driver_check("cuEventSynchronize", driver::cuEventSynchronize(end))?;
            driver_check("cuEventElapsedTime", driver::cuEventElapsedTime_v2(&raw mut time, start, end))?;
        }
        Ok(time)
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        for event in self.0.iter().filter(|e| !e.is_null()) {
            // SAFETY: the event is ours and is destroyed once.
            let _ = unsafe { driver::cuEventDestroy_v2(*event) };
        }
    }
}

impl CudaBackend {
    pub(super) fn matmul_op(&self, lane: Lane, args: &Matmul) -> Result {
        check_views(args)?;
        let Matmul { a, b, d, m, n, k, .. } = *args;
        if m * n == 0 {
            return Ok(());
        }
        let d_at = self.address(d);
        let bias = self.optional(args.bias);
        let added = args.accumulate || args.residual.is_some();
        let addresses = Addresses {
            a: self.address(a),
            b: self.address(b),
            c: args.residual.map_or(d_at, |r| self.address(r)),
            d: d_at,
            bias,
        };
        // The library adds a bias of the result's own type, and reads it in whole vectors.
        let fused = args.bias.is_some() && a.dtype == d.dtype && bias.is_multiple_of(16);
        let key = Key {
            mnk: [m, n, k],
            turned: [args.transpose_a, args.transpose_b],
            inputs: a.dtype,
            output: d.dtype,
            bias: fused,
            added,
            alignment: [addresses.a, addresses.b, addresses.c, addresses.d].map(alignment),
        };
        let done = k > 0 && self.product(lane, &key, addresses)?;
        if !done {
            self.plain_product(lane, &key, addresses)?;
        }
        match args.bias {
            Some(bias) if !(fused && done) => self.bias_add(lane, d, bias, m, n),
            _ => Ok(()),
        }
    }

    /// Through the library; false when it has no algorithm for the product.
    fn product(&self, lane: Lane, key: &Key, at: Addresses) -> Result<bool> {
        self.driver.enter()?;
        let descriptors = Descriptors::new(key, at.bias)?;
        let Some(algorithm) = self.algorithm(lane, key, &descriptors, at)? else { return Ok(false) };
        check("cublasLtMatmul", self.run(lane, key, &descriptors, &algorithm, at)?)?;
        Ok(true)
    }

    fn run(
        &self,
        lane: Lane,
        key: &Key,
        descriptors: &Descriptors,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        at: Addresses,
    ) -> Result<lt::cublasStatus_t> {
        let workspace = self.workspace(lane, WORKSPACE)?;
        let (alpha, beta) = (1.0f32, if key.added { 1.0f32 } else { 0.0 });
        let [first, second, result] = descriptors.layouts;
        let pointer = |address: u64| address as *const c_void;
        let factor = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: lengths were checked, the layouts describe them, and the workspace has the size that the algorithm was
        // chosen for.
        let code = unsafe {
            lt::cublasLtMatmul(
                self.library.handle,
                descriptors.product,
                factor(&alpha),
                pointer(at.b),
                first,
                pointer(at.a),
                second,
                factor(&beta),
                pointer(at.c),
                result,
                at.d as *mut c_void,
                result,
                algorithm,
                workspace as *mut c_void,
                WORKSPACE as usize,
                self.driver.stream(lane).cast(),
            )
        };
        Ok(code)
    }

    /// The algorithm for a product: of a small one the library's first choice, of a large one the fastest of those tried when
    /// it is first met; `None` when the library has none.
    fn algorithm(
        &self,
        lane: Lane,
        key: &Key,
        descriptors: &Descriptors,
        at: Addresses,
    ) -> Result<Option<lt::cublasLtMatmulAlgo_t>> {
        let mut plans = self.library.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(key) {
            return Ok(*plan);
        }
        let candidates = self.library.candidates(key, descriptors)?;
        let large = key.mnk.iter().product::<usize>() >= LARGE && candidates.len() > 1;
        let best = if large { self.fastest(lane, key, descriptors, &candidates, at)? } else { 0 };
        let plan = candidates.get(best).copied();
        plans.insert(*key, plan);
        Ok(plan)
    }

    /// Index of the fastest candidate. The choice is kept on disk, so that later runs on the machine give the same bits.
    fn fastest(
        &self,
        lane: Lane,
        key: &Key,
        descriptors: &Descriptors,
        candidates: &[lt::cublasLtMatmulAlgo_t],
        at: Addresses,
    ) -> Result<usize> {
        // SAFETY: the library is loaded; the call takes nothing.
        let version = unsafe { lt::cublasLtGetVersion() };
        let name = cache::name(&["matmul", &self.driver.name, &version.to_string(), &format!("{key:?}")]);
        if let Some([kept]) = cache::load(&name).as_deref()
            && usize::from(*kept) < candidates.len()
        {
            return Ok(usize::from(*kept));
        }
        let [m, n, _] = key.mnk;
        let Ok(result) = self.allocate_device(key.output.bytes(m * n)) else {
            tracing::debug!(?key, "no room to try algorithms for a matrix product; the library's first choice it is");
            return Ok(0);
        };
        // What the product is added to may be the result itself, which must not change.
        let at = Addresses { d: result, c: if at.c == at.d { result } else { at.c }, ..at };
        let times: Result<Vec<f32>> =
            candidates.iter().map(|algorithm| self.time(lane, key, descriptors, algorithm, at)).collect();
        // SAFETY: timing has waited for all work on the memory, which nobody else knows.
        let freed = unsafe { driver::cuMemFree_v2(result) };
        let times = times?;
        driver_check("cuMemFree", freed)?;
        let best = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
        tracing::debug!(?key, ?times, best, "tried algorithms for a matrix product");
        cache::keep(&name, &[best as u8]);
        Ok(best)
    }

    /// Milliseconds of a few runs; infinite where the library refuses the algorithm after all.
    fn time(
        &self,
        lane: Lane,
        key: &Key,
        descriptors: &Descriptors,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        at: Addresses,
    ) -> Result<f32> {
        let (watch, stream) = (Stopwatch::new()?, self.driver.stream(lane));
        for repeat in 0..=REPEATS {
            if repeat == 1 {
                watch.mark(0, stream)?;
            }
            let code = self.run(lane, key, descriptors, algorithm, at)?;
            if code != lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
                self.driver.synchronize(lane)?;
                return Ok(f32::INFINITY);
            }
        }
        watch.mark(1, stream)?;
        watch.read()
    }

    /// By a kernel of our own that takes any size and alignment.
    fn plain_product(&self, lane: Lane, key: &Key, at: Addresses) -> Result {
        let name = if key.inputs == key.output { "matmul_same" } else { "matmul_wide" };
        let ([m, n, k], [turn_a, turn_b]) = (key.mnk, key.turned);
        let c = if key.added { at.c } else { 0 };
        // Rows of tiles are the second dimension of the grid, which is limited.
        if m.div_ceil(16) > 65_535 {
            return Err(shape(OP, format!("{m} rows of {n} by {k}: no algorithm for these sizes")));
        }
        if m * n * k >= LARGE {
            tracing::warn!(?key, "cuBLASLt has no algorithm for a large matrix product; a slow kernel does it");
        }
        let list = arguments![at.a, at.b, c, at.d, m, n, k, turn_a, turn_b];
        let launch = Launch { grid: [n.div_ceil(16), m.div_ceil(16), 1], block: [16, 16], shared: 0 };
        // SAFETY: the kernel takes these; lengths were checked.
        unsafe { self.launch(lane, (KernelSource::Matmul, key.inputs, name), launch, list) }
    }
}

fn check_views(args: &Matmul) -> Result {
    let Matmul { a, b, d, m, n, k, .. } = *args;
    float(OP, "a", a)?;
    float(OP, "d", d)?;
    is(OP, "b", b, a.dtype, k * n)?;
    length(OP, "a", a, m * k)?;
    length(OP, "d", d, m * n)?;
    if d.dtype != a.dtype && d.dtype != DType::F32 {
        return Err(shape(OP, format!("d is {}, it must be {} or fp32", d.dtype, a.dtype)));
    }
    if let Some(bias) = args.bias {
        is(OP, "bias", bias, a.dtype, n)?;
    }
    if let Some(residual) = args.residual {
        is(OP, "residual", residual, d.dtype, m * n)?;
    }
    if args.accumulate && (args.bias.is_some() || args.residual.is_some()) {
        return Err(shape(OP, "accumulate goes with neither bias nor residual"));
    }
    Ok(())
}
