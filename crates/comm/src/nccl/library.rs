//! NCCL's functions, from a library that is opened by its path.

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use gpurun_device::{CudaLibrary, nccl_library};
use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};

/// What NCCL answers. Not the enumeration: a newer library may know more answers than our bindings.
pub(super) type Code = u32;

pub(super) const SUCCESS: Code = ncclResult_t::ncclSuccess as Code;
pub(super) const IN_PROGRESS: Code = ncclResult_t::ncclInProgress as Code;
pub(super) const REMOTE_ERROR: Code = ncclResult_t::ncclRemoteError as Code;

/// A `CUstream`.
type Stream = *mut c_void;

/// Oldest version whose calls can be told not to block and to end within a deadline.
const OLDEST: c_int = 21_800;
/// Oldest version that lets ranks share a GPU.
pub(super) const SHARES_GPU: c_int = 23_003;

macro_rules! functions {
    ($($field:ident: $symbol:literal ($($argument:ty),*) -> $answer:ty;)*) => {
        /// The functions that we call.
        pub(super) struct Library {
            pub version: c_int,
            pub path: String,
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl Library {
            fn bind(opened: &Opened, path: String) -> Result<Self, libloading::Error> {
                Ok(Self {
                    version: 0,
                    path,
                    $($field: {
                        // SAFETY: the type is the one that NCCL's header gives this symbol.
                        let symbol = unsafe { opened.get::<unsafe extern "C" fn($($argument),*) -> $answer>($symbol)? };
                        *symbol
                    },)*
                })
            }
        }
    };
}

functions! {
    get_version: b"ncclGetVersion\0" (*mut c_int) -> Code;
    get_unique_id: b"ncclGetUniqueId\0" (*mut ncclUniqueId) -> Code;
    error_string: b"ncclGetErrorString\0" (Code) -> *const c_char;
    last_error: b"ncclGetLastError\0" (ncclComm_t) -> *const c_char;
    init: b"ncclCommInitRankConfig\0" (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;
    async_error: b"ncclCommGetAsyncError\0" (ncclComm_t, *mut Code) -> Code;
    finalize: b"ncclCommFinalize\0" (ncclComm_t) -> Code;
    destroy: b"ncclCommDestroy\0" (ncclComm_t) -> Code;
    abort: b"ncclCommAbort\0" (ncclComm_t) -> Code;
    all_gather: b"ncclAllGather\0" (*const c_void, *mut c_void, usize, c_int, ncclComm_t, Stream) -> Code;
    reduce_scatter: b"ncclReduceScatter\0" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> Code;
    all_reduce: b"ncclAllReduce\0" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> Code;
    send: b"ncclSend\0" (*const c_void, usize, c_int, c_int, ncclComm_t, Stream) -> Code;
    recv: b"ncclRecv\0" (*mut c_void, usize, c_int, c_int, ncclComm_t, Stream) -> Code;
}

impl Library {
    /// Finds and opens NCCL; `None` where there is none.
    ///
    /// # Errors
    /// When what is there cannot be used.
    pub fn load() -> Result<Option<Self>, String> {
        let CudaLibrary { path, error, .. } = nccl_library();
        let Some(path) = path else { return Ok(None) };
        let shown = path.display().to_string();
        if let Some(error) = error {
            return Err(format!("{shown} cannot be loaded: {error}"));
        }
        // SAFETY: NCCL's initialisers may run at any time; it is loaded already, by the search.
        let opened =
            unsafe { Opened::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| format!("{shown}: {e}"))?;
        let mut library =
            Self::bind(&opened, shown.clone()).map_err(|e| format!("{shown} is not NCCL as it should be: {e}"))?;
        // Its threads outlive communicators: it stays loaded.
        std::mem::forget(opened);
        // SAFETY: NCCL writes to a local.
        let code = unsafe { (library.get_version)(&raw mut library.version) };
        if code != SUCCESS || library.version < OLDEST {
            return Err(format!("{shown} is NCCL {}; {} or newer is needed", library.words(), dotted(OLDEST)));
        }
        Ok(Some(library))
    }

    /// Its version in words.
    pub fn words(&self) -> String {
        dotted(self.version)
    }

    /// What a code means, with NCCL's last message for a communicator (which may be none).
    pub fn explain(&self, code: Code, comm: ncclComm_t) -> String {
        // SAFETY: NCCL returns strings of its own, which live as long as the library; `comm` is alive or null.
        let (meaning, last) = unsafe { ((self.error_string)(code), (self.last_error)(comm)) };
        let text = |pointer: *const c_char| {
            if pointer.is_null() {
                return String::new();
            }
            // SAFETY: as above; the string ends in a zero byte.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned()
        };
        let (meaning, last) = (text(meaning), text(last));
        if last.is_empty() { format!("NCCL: {meaning}") } else { format!("NCCL: {meaning}: {last}") }
    }
}

fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
