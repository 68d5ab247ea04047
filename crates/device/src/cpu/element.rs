//! Storage types and their conversion to and from fp32.

use gpurun_types::DType;
use half::{bf16, f16};

/// A type that arenas hold.
pub(super) trait Stored: Copy + Send + Sync + 'static {
    const DTYPE: DType;
}

impl Stored for i32 {
    const DTYPE: DType = DType::I32;
}

impl Stored for f64 {
    const DTYPE: DType = DType::F64;
}

/// A floating type that models compute with: stored as it is, worked on in fp32.
pub(super) trait Float: Stored {
    /// Widens a run.
    fn load(src: &[Self], dst: &mut [f32]);
    /// Rounds a run, to nearest even.
    fn store(src: &[f32], dst: &mut [Self]);

    /// A run as fp32: itself, or widened into the buffer, which is at least as long.
    fn wide<'a>(src: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
        let buffer = &mut buffer[..src.len()];
        Self::load(src, buffer);
        buffer
    }

    /// Lets `body` write a run in fp32: in place, or in the buffer, which is then rounded.
    fn write(dst: &mut [Self], buffer: &mut [f32], body: impl FnOnce(&mut [f32])) {
        let buffer = &mut buffer[..dst.len()];
        body(buffer);
        Self::store(buffer, dst);
    }

    /// Lets `body` change a run in fp32: in place, or widened into the buffer, which is then rounded.
    fn update(dst: &mut [Self], buffer: &mut [f32], body: impl FnOnce(&mut [f32])) {
        let buffer = &mut buffer[..dst.len()];
        Self::load(dst, buffer);
        body(buffer);
        Self::store(buffer, dst);
    }
    /// The run itself where it is fp32 already.
    fn as_wide(_src: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl Stored for f32 {
    const DTYPE: DType = DType::F32;
}

impl Float for f32 {
    fn as_wide(src: &[Self]) -> Option<&[f32]> {
        Some(src)
    }

    fn load(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn store(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }

    fn wide<'a>(src: &'a [Self], _buffer: &'a mut [f32]) -> &'a [f32] {
        src
    }

    fn write(dst: &mut [Self], _buffer: &mut [f32], body: impl FnOnce(&mut [f32])) {
        body(dst);
    }

    fn update(dst: &mut [Self], _buffer: &mut [f32], body: impl FnOnce(&mut [f32])) {
        body(dst);
    }
}

impl Stored for bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Float for bf16 {
    fn load(src: &[Self], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len());
        load_bf16(src, dst);
    }

    fn store(src: &[f32], dst: &mut [Self]) {
        assert_eq!(src.len(), dst.len());
        store_bf16(src, dst);
    }
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn load_bf16(src: &[bf16], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = f32::from_bits(u32::from(s.to_bits()) << 16);
    }
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn store_bf16(src: &[f32], dst: &mut [bf16]) {
    for (d, s) in dst.iter_mut().zip(src) {
        let bits = s.to_bits();
        // Half of the last kept bit, less one when that bit is even: ties go to even.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // A NaN must not round to infinity; it stays a NaN when a fraction bit is set.
        let nan = (bits >> 16) | 0x40;
        *d = bf16::from_bits(if s.is_nan() { nan } else { rounded } as u16);
    }
}

impl Stored for f16 {
    const DTYPE: DType = DType::F16;
}

impl Float for f16 {
    fn load(src: &[Self], dst: &mut [f32]) {
        use half::slice::HalfFloatSliceExt;
        src.convert_to_f32_slice(dst);
    }

    fn store(src: &[f32], dst: &mut [Self]) {
        use half::slice::HalfFloatSliceExt;
        dst.convert_from_f32_slice(src);
    }
}

/// Runs a block with `$t` bound to the storage type of `$view`; other types have been refused before.
macro_rules! by_float {
    ($view:expr, $t:ident => $body:expr) => {
        match $view.dtype {
            gpurun_types::DType::F32 => {
                type $t = f32;
                $body
            }
            gpurun_types::DType::Bf16 => {
                type $t = half::bf16;
                $body
            }
            gpurun_types::DType::F16 => {
                type $t = half::f16;
                $body
            }
            other => unreachable!("checked to be a floating type, not {other}"),
        }
    };
}
pub(super) use by_float;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        let _limit = testkit::time_limit(30);
        let mut bits: u32 = 1;
        let values: Vec<f32> = (0..200_000)
            .map(|_| {
                bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f32::from_bits(bits)
            })
            .chain([0.0, -0.0, f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1.003_906_2, 1.011_718_8])
            .collect();
        let mut out = vec![bf16::ZERO; values.len()];
        bf16::store(&values, &mut out);
        for (value, got) in values.iter().zip(&out) {
            let want = bf16::from_f32(*value);
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{value}: {got} {want}");
        }
    }
}
