//! The driver: one device's primary context, its streams, events and launches.

use std::collections::VecDeque;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use gpurun_types::Lane;

use super::Result;
use crate::{DeviceError, Mark};

/// `Err` that names a driver call and what the driver said.
pub(super) fn check(call: &str, code: sys::CUresult) -> Result {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DeviceError::Failed { operation: call.to_owned(), reason: explain(code) })
}

/// What the driver says about an error code.
pub(super) fn explain(code: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer to a string of its own, which lives as long as the library.
    let found = unsafe { sys::cuGetErrorString(code, &raw mut text) };
    if found != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: on success the pointer is to a string that ends in a zero byte.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} ({code:?})", text.to_string_lossy())
}

/// What tells device `index` (a card, or a part of one) from every other one, in every process.
pub(super) fn uuid(index: i32) -> Result<[u8; 16]> {
    let mut device = 0;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the driver is loaded and initialised, and writes to locals.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, index))?;
        check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&raw mut uuid, device))?;
    }
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// A device, its primary context, and one stream for each lane.
pub(super) struct Driver {
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (i32, i32),
    /// Largest dynamic shared memory of one block, in bytes.
    pub shared_memory: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    lanes: Vec<LaneState>,
}

// SAFETY: handles of a context may be used from any thread that makes the context current, which `enter` does; the lists of
// events lie behind a lock.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

struct LaneState {
    stream: sys::CUstream,
    marks: Mutex<Marks>,
}

/// Events of marks that may still be waited for, oldest first, and events to use again.
#[derive(Default)]
struct Marks {
    last: u64,
    live: VecDeque<(u64, sys::CUevent)>,
    spare: Vec<sys::CUevent>,
}

/// Marks that are kept although they have passed: asking the driver costs more than an event.
const KEPT: usize = 64;

impl Driver {
    /// Opens device `index`. Its libraries have been found before.
    pub fn open(index: u32) -> Result<Self> {
        // SAFETY: plain calls with pointers to locals; the library is present, which the caller has checked.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            let mut count = 0;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            if i64::from(index) >= i64::from(count) {
                return Err(DeviceError::Missing(format!("there is no GPU {index}: this machine shows {count}")));
            }
            let mut device = 0;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, index as i32))?;
            let mut name = [0; 256];
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            let attribute = |which| {
                let mut value = 0;
                check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&raw mut value, which, device)).map(|()| value)
            };
            use sys::CUdevice_attribute as Attribute;
            let capability = (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            );
            if capability < (8, 0) {
                return Err(DeviceError::Missing(format!(
                    "{name} has compute capability {}.{}; 8.0 (Ampere) or newer is needed",
                    capability.0, capability.1
                )));
            }
            let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
            let mut context = std::ptr::null_mut();
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            let shared_memory = usize::try_from(shared).unwrap_or(0);
            let mut driver = Self { name, capability, shared_memory, device, context, lanes: Vec::new() };
            driver.enter()?;
            for _ in Lane::ALL {
                let mut stream = std::ptr::null_mut();
                let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
                check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, flags))?;
                driver.lanes.push(LaneState { stream, marks: Mutex::default() });
            }
            Ok(driver)
        }
    }

    /// Makes the context current on the calling thread.
    pub fn enter(&self) -> Result {
        // SAFETY: the context is retained until drop.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub fn context(&self) -> sys::CUcontext {
        self.context
    }

    pub fn stream(&self, lane: Lane) -> sys::CUstream {
        self.lanes[lane.index()].stream
    }

    /// Architecture to compile for, such as `sm_90a`.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        // Features of one architecture only exist from 9.0 on.
        let suffix = if major >= 9 { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }

    pub fn record(&self, lane: Lane) -> Result<Mark> {
        self.enter()?;
        let state = &self.lanes[lane.index()];
        let mut marks = state.marks.lock().unwrap_or_else(PoisonError::into_inner);
        while marks.live.len() > KEPT {
            let Some(&(_, event)) = marks.live.front() else { break };
            // SAFETY: the event is ours and has been recorded.
            if unsafe { sys::cuEventQuery(event) } != sys::CUresult::CUDA_SUCCESS {
                break;
            }
            marks.live.pop_front();
            marks.spare.push(event);
        }
        let event = match marks.spare.pop() {
            Some(event) => event,
            None => {
                let mut event = std::ptr::null_mut();
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: the driver writes a handle to a local.
                check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
                event
            }
        };
        // SAFETY: event and stream belong to the current context.
        let recorded = check("cuEventRecord", unsafe { sys::cuEventRecord(event, state.stream) });
        if let Err(error) = recorded {
            marks.spare.push(event);
            return Err(error);
        }
        marks.last += 1;
        let number = marks.last;
        marks.live.push_back((number, event));
        Ok(Mark { lane, number })
    }

    /// Makes later work on `lane` wait for `mark`: on [`Lane::Host`] the calling thread waits, because that lane's work runs
    /// on it. A mark that is no longer kept has passed.
    pub fn wait(&self, lane: Lane, mark: Mark) -> Result {
        if lane == mark.lane || mark.lane == Lane::Host {
            return Ok(());
        }
        self.enter()?;
        let marks = self.lanes[mark.lane.index()].marks.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(found) = marks.live.binary_search_by_key(&mark.number, |(number, _)| *number) else {
            return Ok(());
        };
        let event = marks.live[found].1;
        if lane == Lane::Host {
            // SAFETY: the event is ours and recorded; the lock keeps it from being used again meanwhile.
            return check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event) });
        }
        // SAFETY: as above; the wait refers to what the event holds now, so it may be recorded again later.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.stream(lane), event, 0) })
    }

    /// True when all work before `mark` is done.
    pub fn passed(&self, mark: Mark) -> Result<bool> {
        self.enter()?;
        // Somebody may hold the lock for as long as he waits for a mark of this lane; then it has not passed, for all we know.
        let Ok(marks) = self.lanes[mark.lane.index()].marks.try_lock() else { return Ok(false) };
        let Ok(found) = marks.live.binary_search_by_key(&mark.number, |(number, _)| *number) else {
            return Ok(true);
        };
        // SAFETY: the event is ours and recorded; the lock keeps it from being used again meanwhile.
        match unsafe { sys::cuEventQuery(marks.live[found].1) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    pub fn synchronize(&self, lane: Lane) -> Result {
        self.enter()?;
        // SAFETY: the stream is ours.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream(lane)) })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        // SAFETY: handles are ours and used no more; an error at the end of a backend has nobody to go to.
        unsafe {
            for lane in &mut self.lanes {
                let _ = sys::cuStreamSynchronize(lane.stream);
                let marks = lane.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
                for event in marks.live.drain(..).map(|(_, e)| e).chain(marks.spare.drain(..)) {
                    let _ = sys::cuEventDestroy_v2(event);
                }
                let _ = sys::cuStreamDestroy_v2(lane.stream);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Arguments of a kernel, in order.
#[derive(Default)]
pub(super) struct Arguments {
    /// Eight-byte slots; a scalar lies at the start of its slot.
    slots: Vec<u64>,
    /// First slot of each argument.
    starts: Vec<usize>,
}

impl Arguments {
    /// Adds the bytes of one argument.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.starts.push(self.slots.len());
        for chunk in bytes.chunks(8) {
            let mut slot = [0; 8];
            slot[..chunk.len()].copy_from_slice(chunk);
            self.slots.push(u64::from_ne_bytes(slot));
        }
    }

    fn pointers(&mut self) -> Vec<*mut c_void> {
        let base = self.slots.as_mut_ptr();
        // SAFETY: starts are indices of slots that were pushed.
        self.starts.iter().map(|start| unsafe { base.add(*start) }.cast()).collect()
    }
}

/// A value that a kernel takes.
pub(super) trait Argument {
    fn add(&self, to: &mut Arguments);
}

macro_rules! argument {
    ($($type:ty),*) => { $(impl Argument for $type {
        fn add(&self, to: &mut Arguments) {
            to.bytes(&self.to_ne_bytes());
        }
    })* };
}
argument!(u32, i32, u64, f32, f64);

impl Argument for bool {
    fn add(&self, to: &mut Arguments) {
        i32::from(*self).add(to);
    }
}

impl Argument for usize {
    /// Sizes are 64 bits wide in every kernel.
    fn add(&self, to: &mut Arguments) {
        (*self as u64).add(to);
    }
}

impl Argument for [f64] {
    /// A structure of that many numbers, by value.
    fn add(&self, to: &mut Arguments) {
        let bytes: Vec<u8> = self.iter().flat_map(|v| v.to_ne_bytes()).collect();
        to.bytes(&bytes);
    }
}

/// Collects a kernel's arguments.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {{
        let mut list = $crate::cuda::driver::Arguments::default();
        $($crate::cuda::driver::Argument::add(&$value, &mut list);)*
        list
    }};
}
pub(super) use arguments;

/// How many blocks of how many threads, and bytes of dynamic shared memory of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub grid: [usize; 3],
    pub block: [usize; 2],
    pub shared: usize,
}

impl Launch {
    pub fn new(grid: usize, block: usize) -> Self {
        Self { grid: [grid, 1, 1], block: [block, 1], shared: 0 }
    }

    /// Enough blocks of 256 threads for `items`, up to a few waves; kernels stride over the rest.
    pub fn over(items: usize) -> Self {
        Self::new(items.div_ceil(256).clamp(1, 132 * 16), 256)
    }
}

impl Driver {
    /// Enqueues a kernel. A launch of no blocks is no work.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, and its pointers stay within memory that the caller owns.
    pub unsafe fn launch(&self, lane: Lane, function: sys::CUfunction, launch: Launch, mut args: Arguments) -> Result {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.enter()?;
        // Dynamic and static shared memory together may pass 48 KiB only when this allows it.
        if launch.shared > 16 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a loaded module.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, launch.shared as i32) })?;
        }
        let mut pointers = args.pointers();
        let ([x, y, z], [bx, by]) = (launch.grid.map(|n| n as u32), launch.block.map(|n| n as u32));
        // SAFETY: `pointers` are to as many arguments as the kernel takes, which the caller vouches for.
        let code = unsafe {
            sys::cuLaunchKernel(
                function,
                x,
                y,
                z,
                bx,
                by,
                1,
                launch.shared as u32,
                self.stream(lane),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", code)
    }
}
