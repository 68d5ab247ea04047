//! Kernels: compiled for the device at hand when first used, and kept on disk.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::sys;

use super::{Result, cache};
use crate::DeviceError;

/// A source file of kernels, and what it is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Fill and conversions, for all types at once.
    Convert,
    /// Element by element.
    Pointwise,
    /// Embedding, cross-entropy, column sums.
    Rows,
    /// Layer norm and RMS norm.
    Norm,
    /// Norms of gradients, decisions of a step, AdamW: no contraction, the same bits as on the host.
    Optimizer,
    /// Attention, for one head dimension.
    Attention,
    /// Attention on the tensor cores, for one head dimension; bf16 and fp16 only.
    Flash,
    /// Matrix products that the library does not take.
    Matmul,
}

impl Source {
    /// Every source.
    pub const ALL: [Self; 8] = [
        Self::Convert,
        Self::Pointwise,
        Self::Rows,
        Self::Norm,
        Self::Optimizer,
        Self::Attention,
        Self::Flash,
        Self::Matmul,
    ];

    fn text(self) -> &'static str {
        match self {
            Self::Convert => include_str!("../../kernels/convert.cu"),
            Self::Pointwise => include_str!("../../kernels/pointwise.cu"),
            Self::Rows => include_str!("../../kernels/rows.cu"),
            Self::Norm => include_str!("../../kernels/norm.cu"),
            Self::Optimizer => include_str!("../../kernels/optimizer.cu"),
            Self::Attention => include_str!("../../kernels/attention.cu"),
            Self::Flash => include_str!("../../kernels/flash.cu"),
            Self::Matmul => include_str!("../../kernels/matmul.cu"),
        }
    }

    fn file(self) -> &'static str {
        match self {
            Self::Convert => "convert.cu",
            Self::Pointwise => "pointwise.cu",
            Self::Rows => "rows.cu",
            Self::Norm => "norm.cu",
            Self::Optimizer => "optimizer.cu",
            Self::Attention => "attention.cu",
            Self::Flash => "flash.cu",
            Self::Matmul => "matmul.cu",
        }
    }
}

/// A source and the constants it is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    /// The source.
    pub source: Source,
    /// Storage type of the kernels: `float`, `bf16` or `f16`.
    pub element: &'static str,
    /// Elements per head, for attention; else 0.
    pub head_dim: usize,
}

/// Code for one architecture (`sm_90a` and the like), from the disk or from the compiler.
///
/// # Errors
/// When the compiler refuses the source, or its library fails.
pub fn compile(unit: Unit, architecture: &str) -> Result<Vec<u8>> {
    let options = options(unit, architecture);
    let source = format!("{}\n{}", include_str!("../../kernels/common.cuh"), unit.source.text());
    let name = cache::name(&[&version(), &source, &options.join("\n")]);
    if let Some(code) = cache::load(&name) {
        return Ok(code);
    }
    let code = compile_source(&source, unit.source.file(), &options)?;
    cache::keep(&name, &code);
    Ok(code)
}

fn options(unit: Unit, architecture: &str) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--device-as-default-execution-space".to_owned(),
        format!("-DELEMENT={}", unit.element),
    ];
    if unit.source == Source::Optimizer {
        options.push("--fmad=false".to_owned());
    }
    if unit.head_dim > 0 {
        options.push(format!("-DHEAD_DIM={}", unit.head_dim));
    }
    options
}

/// Version of the compiler.
fn version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded; it writes to two locals.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    format!("{major}.{minor}")
}

fn failed(call: &str, code: sys::nvrtcResult) -> DeviceError {
    // SAFETY: the library gives a string of its own for every code.
    let reason = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) };
    DeviceError::Failed { operation: call.to_owned(), reason: reason.to_string_lossy().into_owned() }
}

fn check(call: &str, code: sys::nvrtcResult) -> Result {
    if code == sys::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(failed(call, code)) }
}

/// A program of the compiler's, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is ours; it is destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn compile_source(source: &str, file: &str, options: &[String]) -> Result<Vec<u8>> {
    let text = |s: &str| CString::new(s).expect("sources and options hold no zero byte");
    let (source, name) = (text(source), text(file));
    let options: Vec<CString> = options.iter().map(|o| text(o)).collect();
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: strings end in a zero byte and outlive the calls; sizes are asked before buffers of those sizes are filled.
    unsafe {
        let none = std::ptr::null();
        let code = sys::nvrtcCreateProgram(&raw mut program.0, source.as_ptr(), name.as_ptr(), 0, none, none);
        check("nvrtcCreateProgram", code)?;
        let compiled = sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr());
        if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(DeviceError::Failed { operation: format!("compiling {file}"), reason: log(&program) });
        }
        let mut size = 0;
        check("nvrtcGetCUBINSize", sys::nvrtcGetCUBINSize(program.0, &raw mut size))?;
        let mut code = vec![0u8; size];
        check("nvrtcGetCUBIN", sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()))?;
        Ok(code)
    }
}

/// What the compiler said.
fn log(program: &Program) -> String {
    let mut size = 0;
    // SAFETY: the size is asked before a buffer of that size is filled.
    unsafe {
        if sys::nvrtcGetProgramLogSize(program.0, &raw mut size) != sys::nvrtcResult::NVRTC_SUCCESS {
            return "no log".to_owned();
        }
        let mut log = vec![0u8; size];
        sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast());
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }
}
