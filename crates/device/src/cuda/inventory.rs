//! Which GPUs there are, what is free on them, and whether their links carry bytes unharmed.

use std::ffi::CStr;
use std::time::Instant;

use cudarc::driver::sys;
use gpurun_types::{Bytes, DType, Lane, Place, View};

use super::driver::{check, uuid};
use super::libraries::driver_library;
use super::{CudaBackend, Result, missing};
use crate::{Backend, DeviceError};

/// A GPU that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// What tells it from every other one, in every process.
    pub id: [u8; 16],
    /// Its maker's name for it, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (i32, i32),
    /// Its memory, used or free.
    pub memory: Bytes,
    /// Its place on the PCI bus, such as `0000:3b:00.0`.
    pub pci: String,
}

/// The GPUs that this process may use (those that `CUDA_VISIBLE_DEVICES` leaves), in the driver's order. Opens none of them.
///
/// # Errors
/// When there is no driver, or it fails.
pub fn cuda_gpus() -> Result<Vec<Gpu>> {
    each_device(describe)
}

/// What tells each of the GPUs that this process may use from every other one in every process. Opens none of them.
///
/// # Errors
/// When there is no driver, or it fails.
pub fn cuda_device_ids() -> Result<Vec<[u8; 16]>> {
    each_device(uuid)
}

fn each_device<T>(what: fn(i32) -> Result<T>) -> Result<Vec<T>> {
    let driver = driver_library();
    if driver.path.is_none() {
        return Err(missing(&driver));
    }
    let found = std::panic::catch_unwind(|| {
        let mut count = 0;
        // SAFETY: the driver is loaded, and writes to a local.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
        }
        (0..count).map(what).collect()
    });
    found.unwrap_or_else(|_| Err(DeviceError::Missing("the driver lacks a function that is needed".to_owned())))
}

fn describe(index: i32) -> Result<Gpu> {
    use sys::CUdevice_attribute as Attribute;
    let (mut device, mut memory) = (0, 0);
    let (mut name, mut pci) = ([0; 256], [0; 64]);
    // SAFETY: the driver is loaded and initialised, and writes to locals, strings with their zero byte and no longer than told.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, index))?;
        check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        check("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(pci.as_mut_ptr(), 63, device))?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory, device))?;
        let attribute = |which| {
            let mut value = 0;
            check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&raw mut value, which, device)).map(|()| value)
        };
        Ok(Gpu {
            id: uuid(index)?,
            name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            memory: Bytes(memory as u64),
            pci: CStr::from_ptr(pci.as_ptr()).to_string_lossy().to_lowercase(),
        })
    }
}

/// Rates of the link between a GPU and pinned host memory, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostLink {
    /// Host to device.
    pub up: f64,
    /// Device to host.
    pub down: f64,
}

/// The link between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerLink {
    /// True when one reaches the other's memory with no way through the host's.
    pub direct: bool,
    /// Bytes per second from the first to the second.
    pub rate: f64,
}

/// What a check sends: enough for the link to come to speed.
const CHECKED: usize = 64 << 20;

/// A pattern that no shifted, repeated or zeroed piece of it equals.
fn pattern(salt: u32) -> Vec<u8> {
    (0..CHECKED as u32 / 4).flat_map(|i| (i.wrapping_add(salt)).wrapping_mul(0x9e37_79b1).to_le_bytes()).collect()
}

fn whole(backend: &dyn Backend, place: Place) -> Result<View> {
    let arena = backend.allocate(place, Bytes(CHECKED as u64))?;
    Ok(View { arena, offset: 0, len: CHECKED / 4, dtype: DType::F32 })
}

/// Seconds of the fastest of a few runs of work that is enqueued on the compute lane.
fn fastest(backend: &dyn Backend, work: impl Fn() -> Result) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        work()?;
        backend.synchronize(Lane::Compute)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn unharmed(what: &str, sent: &[u8], came: &[u8]) -> Result {
    match sent.iter().zip(came).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(DeviceError::Failed {
            operation: what.to_owned(),
            reason: format!("byte {at} of {} came as {:#04x}, not {:#04x}", sent.len(), came[at], sent[at]),
        }),
    }
}

/// Sends a pattern from pinned host memory to the device and back, compares, and times both ways.
///
/// # Errors
/// When the device fails, or a byte changes on the way.
pub fn check_host_link(backend: &dyn Backend) -> Result<HostLink> {
    let sent = pattern(1);
    let [host, back] = [whole(backend, Place::Host)?, whole(backend, Place::Host)?];
    let device = whole(backend, Place::Device)?;
    backend.upload(&sent, host)?;
    let up = fastest(backend, || backend.copy(Lane::Compute, host, device))?;
    let down = fastest(backend, || backend.copy(Lane::Compute, device, back))?;
    let mut came = vec![0; CHECKED];
    backend.download(back, &mut came)?;
    unharmed("copying to the device and back", &sent, &came)?;
    Ok(HostLink { up: CHECKED as f64 / up, down: CHECKED as f64 / down })
}

/// Sends a pattern from one GPU's memory to another's, compares, and times it.
///
/// # Errors
/// When a device fails, or a byte changes on the way.
pub fn check_peer_link(from: &CudaBackend, to: &CudaBackend) -> Result<PeerLink> {
    let sent = pattern(2);
    let [source, target] = [whole(from, Place::Device)?, whole(to, Place::Device)?];
    from.upload(&sent, source)?;
    let mut direct = 0;
    // SAFETY: both devices are open; the driver writes to a local.
    let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut direct, to.driver.device(), from.driver.device()) };
    check("cuDeviceCanAccessPeer", code)?;
    to.driver.enter()?;
    if direct != 0 {
        // SAFETY: both contexts are retained by their backends. That access is on already is no failure.
        match unsafe { sys::cuCtxEnablePeerAccess(from.driver.context(), 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            code => check("cuCtxEnablePeerAccess", code)?,
        }
    }
    let (source_address, target_address) = (from.address(source), to.address(target));
    let seconds = fastest(to, || {
        to.driver.enter()?;
        // SAFETY: both addresses are arenas of that many bytes, in the contexts named.
        let code = unsafe {
            let stream = to.driver.stream(Lane::Compute);
            let (to, from) = (to.driver.context(), from.driver.context());
            sys::cuMemcpyPeerAsync(target_address, to, source_address, from, CHECKED, stream)
        };
        check("cuMemcpyPeerAsync", code)
    })?;
    let mut came = vec![0; CHECKED];
    to.download(target, &mut came)?;
    unharmed("copying from one GPU to the other", &sent, &came)?;
    Ok(PeerLink { direct: direct != 0, rate: CHECKED as f64 / seconds })
}

impl CudaBackend {
    /// Device memory that is free now (nobody's, of any process), and all of it.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn device_memory(&self) -> Result<(Bytes, Bytes)> {
        self.driver.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; the driver writes to locals.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuBackend;

    #[test]
    fn a_link_that_changes_a_byte_is_named() {
        let _limit = testkit::time_limit(20);
        let sent = pattern(1);
        let mut came = sent.clone();
        assert!(unharmed("copying", &sent, &came).is_ok());
        came[4097] ^= 1;
        let error = unharmed("copying", &sent, &came).expect_err("one byte differs").to_string();
        assert!(error.contains("byte 4097"), "{error}");
    }

    #[test]
    fn the_check_runs_on_any_backend() {
        let _limit = testkit::time_limit(20);
        let link = check_host_link(&CpuBackend::new(1).expect("a backend")).expect("memory carries bytes");
        assert!(link.up > 0.0 && link.down > 0.0);
    }
}
