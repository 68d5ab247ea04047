//! Arenas on the device and in pinned host memory.

use cudarc::driver::sys;
use gpurun_types::{ArenaId, Bytes, DType, Lane, Place, View};

use super::check::shape;
use super::driver::{check, explain};
use super::{CudaBackend, Result};
use crate::{Backend, DeviceError};

/// One run of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arena {
    /// Address on the device.
    pub address: u64,
    pub bytes: u64,
    /// The same memory as an arena of the host's own backend; `None` on the device.
    pub host: Option<ArenaId>,
}

impl Arena {
    fn place(self) -> Place {
        if self.host.is_some() { Place::Host } else { Place::Device }
    }
}

fn out_of_memory(place: Place, bytes: Bytes, code: sys::CUresult) -> DeviceError {
    DeviceError::OutOfMemory { place, bytes, reason: explain(code) }
}

impl CudaBackend {
    pub(super) fn allocate_arena(&self, place: Place, bytes: Bytes) -> Result<ArenaId> {
        self.driver.enter()?;
        let arena = match place {
            Place::Device => Arena { address: self.allocate_device(bytes)?, bytes: bytes.0, host: None },
            Place::Host => self.allocate_host(bytes)?,
        };
        let mut arenas = self.arenas.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        arenas.push(arena);
        Ok(ArenaId(arenas.len() as u32 - 1))
    }

    /// Gives an arena's memory back; what is left of it has no bytes.
    pub(super) fn release_arena(&self, id: ArenaId) -> Result {
        self.driver.enter()?;
        for lane in Lane::ALL {
            self.driver.synchronize(lane)?;
        }
        let mut arenas = self.arenas.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(slot) = arenas.get_mut(id.0 as usize) else {
            return Err(shape("release", format!("there is no arena {}", id.0)));
        };
        let arena = std::mem::replace(slot, Arena { address: 0, bytes: 0, host: slot.host });
        drop(arenas);
        self.free(arena)?;
        arena.host.map_or(Ok(()), |host| self.host.release(host))
    }

    /// Frees device memory, or takes host memory from the driver's register. All work on it is done.
    fn free(&self, arena: Arena) -> Result {
        if arena.address == 0 {
            return Ok(());
        }
        match arena.host {
            // SAFETY: the address is from `cuMemAlloc`; callers free each once, with all work on it done.
            None => check("cuMemFree", unsafe { sys::cuMemFree_v2(arena.address) }),
            Some(host) => {
                let start = View { arena: host, offset: 0, len: 0, dtype: DType::F16 };
                let start = self.host.host_pointer(start).expect("host memory has a host address");
                // SAFETY: the range was registered by `allocate_host`; callers take it out once, with all work on it done.
                check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(start.cast()) })
            }
        }
    }

    /// Zeroed device memory.
    pub(super) fn allocate_device(&self, bytes: Bytes) -> Result<u64> {
        if bytes.0 == 0 {
            return Ok(0);
        }
        let mut address = 0;
        // SAFETY: the driver writes an address to a local.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.0 as usize) };
        if code != sys::CUresult::CUDA_SUCCESS {
            return Err(out_of_memory(Place::Device, bytes, code));
        }
        let stream = self.driver.stream(Lane::Compute);
        // SAFETY: the memory was just allocated with that many bytes.
        let zeroed = check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes.0 as usize, stream) })
            .and_then(|()| self.driver.synchronize(Lane::Compute));
        if let Err(error) = zeroed {
            // SAFETY: nobody else knows the address.
            let _ = unsafe { sys::cuMemFree_v2(address) };
            return Err(error);
        }
        Ok(address)
    }

    /// Host memory that the device can address: pages of our own, touched by all threads, then registered, which is many
    /// times faster than pages from the driver.
    fn allocate_host(&self, bytes: Bytes) -> Result<Arena> {
        let host = self.host.allocate(Place::Host, bytes)?;
        let mut address = 0;
        if bytes.0 > 0 {
            let start = View { arena: host, offset: 0, len: 0, dtype: DType::F16 };
            let start = self.host.host_pointer(start).expect("host memory has a host address");
            // SAFETY: the range is an arena of the host backend, which outlives its registration.
            let code = unsafe {
                sys::cuMemHostRegister_v2(
                    start.cast(),
                    bytes.0 as usize,
                    sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP,
                )
            };
            if code != sys::CUresult::CUDA_SUCCESS {
                return Err(out_of_memory(Place::Host, bytes, code));
            }
            // SAFETY: the range has just been registered; the driver writes an address to a local.
            let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, start.cast(), 0) };
            check("cuMemHostGetDevicePointer", code)?;
        }
        Ok(Arena { address, bytes: bytes.0, host: Some(host) })
    }

    /// Checks that views lie within their arenas, aligned to their elements.
    pub(super) fn check(&self, operation: &'static str, views: impl IntoIterator<Item = View>) -> Result {
        let arenas = self.arenas.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        for view in views {
            let Some(arena) = arenas.get(view.arena.0 as usize) else {
                return Err(shape(operation, format!("there is no arena {}", view.arena.0)));
            };
            let View { offset, len, dtype, .. } = view;
            let end = (len as u64).checked_mul(dtype.size() as u64).and_then(|bytes| bytes.checked_add(offset));
            if end.is_none_or(|end| end > arena.bytes) {
                let room = Bytes(arena.bytes);
                return Err(shape(operation, format!("{len} {dtype} at byte {offset} leave their arena of {room}")));
            }
            if !offset.is_multiple_of(dtype.size() as u64) {
                return Err(shape(operation, format!("{dtype} at byte {offset} are not aligned to their size")));
            }
        }
        Ok(())
    }

    fn arena(&self, id: ArenaId) -> Arena {
        self.arenas.read().unwrap_or_else(std::sync::PoisonError::into_inner)[id.0 as usize]
    }

    /// Device address of a view; `check` has been passed, or this panics.
    pub(super) fn address(&self, view: View) -> u64 {
        let arena = self.arena(view.arena);
        assert!(view.offset + view.bytes() <= arena.bytes, "{view:?} leaves its arena");
        arena.address + view.offset
    }

    /// Address of a view, or zero for none.
    pub(super) fn optional(&self, view: Option<View>) -> u64 {
        view.map_or(0, |view| self.address(view))
    }

    /// Where a view lies.
    pub(super) fn place(&self, view: View) -> Place {
        self.arena(view.arena).place()
    }

    /// The same view of the host backend's arena.
    ///
    /// # Errors
    /// When the view lies on the device: the host cannot work on it.
    pub(super) fn on_host(&self, operation: &'static str, view: View) -> Result<View> {
        match self.arena(view.arena).host {
            Some(arena) => Ok(View { arena, ..view }),
            None => Err(shape(operation, "a view of device memory on the host lane")),
        }
    }

    pub(super) fn allocated_bytes(&self, place: Place) -> Bytes {
        let arenas = self.arenas.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        arenas.iter().filter(|a| a.place() == place).map(|a| Bytes(a.bytes)).sum()
    }

    /// Scratch of the backend's own, one for each lane, for operations whose caller brings none. Work on one lane runs in
    /// order, so operations may follow one another in the same bytes.
    pub(super) fn workspace(&self, lane: Lane, bytes: u64) -> Result<u64> {
        let mut spaces = self.workspaces.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let space = &mut spaces[lane.index()];
        if space.1 < bytes {
            self.driver.synchronize(lane)?;
            let bytes = bytes.max(super::WORKSPACE);
            if space.0 != 0 {
                // SAFETY: work on the lane, the memory's only user, is done.
                check("cuMemFree", unsafe { sys::cuMemFree_v2(space.0) })?;
                *space = (0, 0);
            }
            *space = (self.allocate_device(Bytes(bytes))?, bytes);
        }
        Ok(space.0)
    }

    pub(super) fn upload_bytes(&self, src: &[u8], dst: View) -> Result {
        self.check("upload", [dst])?;
        if src.len() as u64 != dst.bytes() {
            return Err(shape("upload", format!("{} bytes into a view of {}", src.len(), dst.bytes())));
        }
        if src.is_empty() {
            return Ok(());
        }
        if let Some(arena) = self.arena(dst.arena).host {
            return self.host.upload(src, View { arena, ..dst });
        }
        self.driver.enter()?;
        let stream = self.driver.stream(Lane::CopyIn);
        // SAFETY: both ranges have `src.len()` bytes, and the call below returns only when the copy is done.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(self.address(dst), src.as_ptr().cast(), src.len(), stream) };
        check("cuMemcpyHtoDAsync", code)?;
        self.driver.synchronize(Lane::CopyIn)
    }

    pub(super) fn download_bytes(&self, src: View, dst: &mut [u8]) -> Result {
        self.check("download", [src])?;
        if dst.len() as u64 != src.bytes() {
            return Err(shape("download", format!("a view of {} bytes into {}", src.bytes(), dst.len())));
        }
        if dst.is_empty() {
            return Ok(());
        }
        if let Some(arena) = self.arena(src.arena).host {
            return self.host.download(View { arena, ..src }, dst);
        }
        self.driver.enter()?;
        let stream = self.driver.stream(Lane::CopyOut);
        // SAFETY: as in `upload_bytes`.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), self.address(src), dst.len(), stream) };
        check("cuMemcpyDtoHAsync", code)?;
        self.driver.synchronize(Lane::CopyOut)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        if self.driver.enter().is_err() {
            return;
        }
        for lane in Lane::ALL {
            let _ = self.driver.synchronize(lane);
        }
        let arenas = std::mem::take(self.arenas.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner));
        // What the driver says of memory that goes with the process helps nobody. The host backend, which owns the registered
        // pages, is dropped after this.
        for arena in arenas {
            let _ = self.free(arena);
        }
        let spaces = self.workspaces.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: all work is done and views do not outlive the backend; each range is freed once.
        unsafe {
            for module in self.modules.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).values() {
                let _ = sys::cuModuleUnload(*module as sys::CUmodule);
            }
            let _ = sys::cuMemFreeHost(self.faults.words.cast());
            for (address, _) in spaces.iter().filter(|(address, _)| *address != 0) {
                let _ = sys::cuMemFree_v2(*address);
            }
        }
    }
}
