//! Loops over fp32 rows, compiled for the vector units that machines have and chosen at run time.

/// `e^x` to about 2 units in the last place; 0 below the smallest normal result, infinity above the largest.
///
/// Range reduction by ln 2 in two parts and a polynomial of degree 6 (after Cephes). No conversion to an integer and no
/// branch: either would keep loops over it from vectorising.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    let clamped = x.clamp(-87.336_54, 88.722_83);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, clamped);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors: n reaches 128.
    let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = whole >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let y = y * power(half) * power(whole.wrapping_sub(half));
    let y = if x < -87.336_54 { 0.0 } else { y };
    let y = if x > 88.722_83 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

const GELU_A: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_B: f32 = 0.044_715;

/// Derivative of gelu: with `s = 1 / (1 + e^-2u)`, `s + 2 x s (1 - s) u'`.
#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    let s = 1.0 / (1.0 + exp(-2.0 * GELU_A * (x + GELU_B * x * x * x)));
    let du = GELU_A * (1.0 + 3.0 * GELU_B * x * x);
    s + 2.0 * x * s * (1.0 - s) * du
}

macro_rules! vectorised {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $($(#[$doc])*
        #[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
        pub(super) fn $name($($arg: $type),*) $(-> $ret)? $body)*
    };
}
pub(super) use vectorised;

/// The sum of `term` over elements of slices of one length, in sixteen running sums that are added up in a fixed order: it
/// vectorises and depends only on its inputs.
#[inline(always)]
pub(super) fn sum16<const N: usize>(slices: [&[f32]; N], term: impl Fn([f32; N]) -> f32) -> f32 {
    let len = slices[0].len();
    assert!(slices.iter().all(|slice| slice.len() == len));
    let mut acc = [0.0f32; 16];
    let whole = len / 16 * 16;
    for start in (0..whole).step_by(16) {
        // One check of bounds for sixteen elements: one each would keep the loop from vectorising.
        let blocks: [&[f32; 16]; N] = slices.map(|s| s[start..start + 16].try_into().expect("sixteen elements"));
        for (lane, a) in acc.iter_mut().enumerate() {
            *a += term(blocks.map(|block| block[lane]));
        }
    }
    for (lane, a) in acc.iter_mut().enumerate().take(len - whole) {
        *a += term(slices.map(|slice| slice[whole + lane]));
    }
    tree16(acc)
}

/// Halves added onto halves.
#[inline(always)]
fn tree16(mut acc: [f32; 16]) -> f32 {
    let mut width = 8;
    while width > 0 {
        for lane in 0..width {
            acc[lane] += acc[lane + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Adds the upper half onto the lower one until one sum is left. The number of sums is a power of two.
#[inline(always)]
pub(super) fn halves<const N: usize>(mut sums: [f64; N]) -> f64 {
    let mut width = N / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

vectorised! {
    /// `x (1 + tanh u) / 2 = x / (1 + e^-2u)`.
    fn gelu(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            let u = GELU_A * (*x + GELU_B * *x * *x * *x);
            *y = *x / (1.0 + exp(-2.0 * u));
        }
    }

    fn gelu_grad(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = *dy * gelu_slope(*x);
        }
    }

    /// `dx` over `dy`.
    fn gelu_grad_over(x: &[f32], dy: &mut [f32]) {
        for (dy, x) in dy.iter_mut().zip(x) {
            *dy *= gelu_slope(*x);
        }
    }

    fn swiglu(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = *g / (1.0 + exp(-*g)) * *u;
        }
    }

    /// Gate and up are replaced by their gradients.
    fn swiglu_grad(gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
        for ((g, u), dy) in gate.iter_mut().zip(up).zip(dy) {
            let s = 1.0 / (1.0 + exp(-*g));
            let dgate = *dy * *u * s * (1.0 + *g * (1.0 - s));
            *u = *dy * *g * s;
            *g = dgate;
        }
    }

    fn add(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += *x;
        }
    }

    fn dot(x: &[f32], y: &[f32]) -> f32 {
        sum16([x, y], |[x, y]| x * y)
    }

    /// `sum x^2` in fp64, in 32 running sums added up by halves.
    fn square_sum(x: &[f32]) -> f64 {
        let mut acc = [0.0f64; 32];
        let (blocks, rest) = x.as_chunks::<32>();
        for block in blocks {
            for (a, v) in acc.iter_mut().zip(block) {
                *a += f64::from(*v) * f64::from(*v);
            }
        }
        for (a, v) in acc.iter_mut().zip(rest) {
            *a += f64::from(*v) * f64::from(*v);
        }
        halves(acc)
    }

    fn max(x: &[f32]) -> f32 {
        let mut acc = [f32::NEG_INFINITY; 16];
        let whole = x.len() / 16 * 16;
        for block in x[..whole].chunks_exact(16) {
            for (a, v) in acc.iter_mut().zip(block) {
                *a = if *v > *a { *v } else { *a };
            }
        }
        let rest = x[whole..].iter().fold(f32::NEG_INFINITY, |a, v| if *v > a { *v } else { a });
        acc.iter().fold(rest, |a, v| if *v > a { *v } else { a })
    }

    /// `x = e^(scale * x - shift)`; the sum of the results.
    fn exp_sum(x: &mut [f32], scale: f32, shift: f32) -> f32 {
        let mut acc = [0.0f32; 16];
        let mut blocks = x.chunks_exact_mut(16);
        for block in &mut blocks {
            for (a, x) in acc.iter_mut().zip(block) {
                *x = exp(*x * scale - shift);
                *a += *x;
            }
        }
        for (a, x) in acc.iter_mut().zip(blocks.into_remainder()) {
            *x = exp(*x * scale - shift);
            *a += *x;
        }
        tree16(acc)
    }

    fn scale(x: &mut [f32], factor: f32) {
        for x in x.iter_mut() {
            *x *= factor;
        }
    }

    /// From scores `p` and `dp`: `p = e^(scale * p - lse)`, `ds = p * (dp - delta) * scale` over `dp`.
    fn softmax_grad(p: &mut [f32], dp: &mut [f32], lse: f32, delta: f32, scale: f32) {
        for (dp, p) in dp.iter_mut().zip(p) {
            *p = exp(*p * scale - lse);
            *dp = *p * (*dp - delta) * scale;
        }
    }

    /// Rotates pairs `(a, b)` by angles whose cosines and sines are given.
    fn rotate(a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32]) {
        for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * *c - y * *s;
            *b = y * *c + x * *s;
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn exp_is_accurate_over_its_range() {
        let _limit = testkit::time_limit(30);
        for i in -87_000..88_700 {
            let x = i as f32 * 1e-3;
            let want = f64::from(x).exp();
            let error = (f64::from(super::exp(x)) - want).abs() / want;
            assert!(error < 3e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(super::exp(-200.0), 0.0);
        assert_eq!(super::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(super::exp(100.0), f32::INFINITY);
        assert!(super::exp(f32::NAN).is_nan());
        assert_eq!(super::exp(0.0), 1.0);
    }
}
