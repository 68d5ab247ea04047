//! Every kernel compiles for every architecture that is supported, where NVRTC is to be found; no GPU is needed.

use gpurun_device::{CUDA_PATH_VARIABLE, KernelSource, KernelUnit, compile_kernels, cuda_libraries};

/// Every source with every storage type and some head dimensions, for one architecture.
fn compiles(architecture: &str) {
    let nvrtc = cuda_libraries().into_iter().find(|library| library.name == "nvrtc").expect("it is looked for");
    if nvrtc.path.is_none() || nvrtc.error.is_some() {
        let required = std::env::var_os("GPURUN_REQUIRE_NVRTC").is_some_and(|v| v == "1");
        assert!(!required, "NVRTC is required and not there: {nvrtc:?}");
        eprintln!("skipped: no NVRTC ({CUDA_PATH_VARIABLE} may name a folder that has it)");
        return;
    }
    for source in KernelSource::ALL {
        let typed = !matches!(source, KernelSource::Convert | KernelSource::Optimizer);
        let elements: &[&'static str] = match source {
            KernelSource::Flash => &["bf16", "f16"],
            _ if typed => &["float", "bf16", "f16"],
            _ => &["float"],
        };
        let head_dims: &[usize] = match source {
            KernelSource::Attention | KernelSource::Flash => &[8, 64, 128],
            _ => &[0],
        };
        for element in elements {
            for head_dim in head_dims {
                let unit = KernelUnit { source, element, head_dim: *head_dim };
                let code = compile_kernels(unit, architecture).unwrap_or_else(|e| panic!("{unit:?}: {e}"));
                assert!(code.starts_with(b"\x7fELF"), "{unit:?} gives a binary for the device");
            }
        }
    }
}

#[test]
fn kernels_compile_for_ampere() {
    let _limit = testkit::time_limit(120);
    compiles("sm_80");
}

#[test]
fn kernels_compile_for_hopper() {
    let _limit = testkit::time_limit(120);
    compiles("sm_90a");
}
