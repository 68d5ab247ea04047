//! The triad that measures memory bandwidth.

use gpurun_types::{DType, View};
use multiversion::multiversion;

use super::{CpuBackend, Result, is};

/// Elements of a piece: a few hundred KiB an array.
const PIECE: usize = 64 * 1024;

impl CpuBackend {
    pub(super) fn triad_op(&self, dst: View, a: View, b: View, past_caches: bool) -> Result {
        for (name, view) in [("dst", dst), ("a", a), ("b", b)] {
            is("triad", name, view, DType::F32, dst.len)?;
        }
        let (to, a, b) = (self.shared::<f32>(dst), self.read::<f32>(a), self.read::<f32>(b));
        self.pieces(dst.len, PIECE, |r| {
            let (to, a, b) = (to.part(r.clone()), &a[r.clone()], &b[r]);
            if past_caches { stream(to, a, b) } else { plain(to, a, b) }
        });
        Ok(())
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma"))]
fn plain(dst: &mut [f32], a: &[f32], b: &[f32]) {
    for ((dst, a), b) in dst.iter_mut().zip(a).zip(b) {
        *dst = *a + 3.0 * *b;
    }
}

/// The same with stores that go past the caches.
#[cfg(target_arch = "x86_64")]
fn stream(dst: &mut [f32], a: &[f32], b: &[f32]) {
    use std::arch::x86_64::{_mm_add_ps, _mm_loadu_ps, _mm_mul_ps, _mm_set1_ps, _mm_sfence, _mm_stream_ps};
    let head = dst.as_ptr().align_offset(16).min(dst.len());
    let whole = head + (dst.len() - head) / 4 * 4;
    for i in (0..head).chain(whole..dst.len()) {
        dst[i] = a[i] + 3.0 * b[i];
    }
    let quads = dst[head..whole].chunks_exact_mut(4);
    for ((dst, a), b) in quads.zip(a[head..whole].chunks_exact(4)).zip(b[head..whole].chunks_exact(4)) {
        // SAFETY: four elements each, and `dst` stays aligned to 16 bytes; these instructions are in every x86-64 processor.
        unsafe {
            let sum = _mm_add_ps(_mm_loadu_ps(a.as_ptr()), _mm_mul_ps(_mm_set1_ps(3.0), _mm_loadu_ps(b.as_ptr())));
            _mm_stream_ps(dst.as_mut_ptr(), sum);
        }
    }
    // SAFETY: as above.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(dst: &mut [f32], a: &[f32], b: &[f32]) {
    plain(dst, a, b);
}
