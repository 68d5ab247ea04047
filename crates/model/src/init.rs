//! Starting values of parameters: a pure function of (seed, parameter name, element).
//!
//! A counter-based generator, so any rank can fill any run of any parameter and every layout starts equal. Bits come from
//! Philox 4x32-10 (Salmon et al. 2011), keyed by seed and name; normals from the Box-Muller transform (Box & Muller 1958), with
//! logarithm, sine and cosine as polynomials over additions and multiplications, which IEEE 754 rounds alike on every machine.

use crate::Init;

/// Elements that are computed together, so that the compiler can use vector instructions: whole Philox blocks of four.
const LANES: usize = 16;
const BATCH: usize = 4 * LANES;

/// Writes elements `start..start + out.len()` of parameter `name` under `seed`.
pub fn fill(seed: u64, name: &str, init: Init, start: usize, out: &mut [f32]) {
    match init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal { std } => normals(key(seed, name), std, start, out),
    }
}

fn normals(key: [u32; 2], std: f32, start: usize, out: &mut [f32]) {
    let mut batch = [0.0; BATCH];
    let mut done = 0;
    while done < out.len() {
        let element = start + done;
        let skip = element % BATCH;
        let count = (BATCH - skip).min(out.len() - done);
        normal_batch(key, (element / BATCH) as u64, &mut batch);
        for (to, from) in out[done..done + count].iter_mut().zip(&batch[skip..]) {
            *to = std * from;
        }
        done += count;
    }
}

/// 64 key bits from seed and name: a chain of bijective mixes (Steele et al. 2014, splitmix64) over the name's words, ended by
/// its length.
fn key(seed: u64, name: &str) -> [u32; 2] {
    let mut hash = mix(seed ^ 0x9e37_79b9_7f4a_7c15);
    for chunk in name.as_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = mix(hash.rotate_left(23) ^ u64::from_le_bytes(word)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    }
    hash = mix(hash ^ name.len() as u64);
    [hash as u32, (hash >> 32) as u32]
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Normals `BATCH * index ..` of a key's stream.
fn normal_batch(key: [u32; 2], index: u64, out: &mut [f32; BATCH]) {
    let counter = |lane: usize| index * LANES as u64 + lane as u64;
    let low = std::array::from_fn(|lane| counter(lane) as u32);
    let high = std::array::from_fn(|lane| (counter(lane) >> 32) as u32);
    let [a, b, c, d] = philox([low, high, [0; LANES], [0; LANES]], key);
    let (first, second) = out.split_at_mut(BATCH / 2);
    box_muller(&a, &b, first);
    box_muller(&c, &d, second);
}

/// The words of `LANES` counters, one array a word.
type Words = [[u32; LANES]; 4];

/// Philox 4x32 with ten rounds, on `LANES` counters at once.
fn philox(mut words: Words, mut key: [u32; 2]) -> Words {
    for _ in 0..10 {
        let [x0, x1, x2, x3] = words;
        let product = |x: u32, factor: u64| u64::from(x) * factor;
        let product0 = x0.map(|x| product(x, 0xd251_1f53));
        let product1 = x2.map(|x| product(x, 0xcd9e_8d57));
        words = [
            std::array::from_fn(|i| (product1[i] >> 32) as u32 ^ x1[i] ^ key[0]),
            product1.map(|p| p as u32),
            std::array::from_fn(|i| (product0[i] >> 32) as u32 ^ x3[i] ^ key[1]),
            product0.map(|p| p as u32),
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    words
}

/// Two normals from each pair of words: cosines into the first half of `out`, sines into the second.
fn box_muller(a: &[u32; LANES], b: &[u32; LANES], out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(LANES);
    for lane in 0..LANES {
        // 23 bits and a half: exact in fp32, never 0, never 1.
        let uniform = ((a[lane] >> 9) as f32 + 0.5) * (1.0 / (1u32 << 23) as f32);
        let radius = (-2.0 * ln(uniform)).sqrt();
        let (sin, cos) = sin_cos_turns(b[lane]);
        cosines[lane] = radius * cos;
        sines[lane] = radius * sin;
    }
}

/// Natural logarithm of a positive, normal number: `2 atanh((m - 1) / (m + 1)) + e ln 2`, with `m` in `[sqrt(1/2), sqrt(2))`.
fn ln(x: f32) -> f32 {
    const SQRT_HALF_BITS: u32 = 0x3f35_04f3;
    let bits = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let exponent = (bits as i32) >> 23;
    let m = f32::from_bits((bits & 0x007f_ffff) + SQRT_HALF_BITS);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    // The series of atanh; the first left-out term is below 4e-10 on this interval.
    let series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0))));
    2.0 * s * series + exponent as f32 * std::f32::consts::LN_2
}

/// Sine and cosine of `word / 2^32` turns: the top two bits choose the quadrant, the rest is an angle in `[-1/8, 1/8)` turns.
fn sin_cos_turns(word: u32) -> (f32, f32) {
    let quadrant = word.wrapping_add(1 << 29) >> 30;
    let rest = word.wrapping_sub(quadrant << 30) as i32;
    let angle = rest as f32 * (std::f32::consts::TAU / 4_294_967_296.0);
    let z = angle * angle;
    // Taylor series; left-out terms are below 4e-8 for angles up to pi / 4.
    let sin = angle * (1.0 + z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0))));
    let cos = 1.0 + z * (-0.5 + z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40320.0))));
    let swap = quadrant & 1 == 1;
    let (s, c) = if swap { (cos, sin) } else { (sin, cos) };
    let sin_sign = if quadrant & 2 == 2 { -1.0 } else { 1.0 };
    let cos_sign = if (quadrant + 1) & 2 == 2 { -1.0 } else { 1.0 };
    (sin_sign * s, cos_sign * c)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seed: u64, name: &str, start: usize, count: usize) -> Vec<f32> {
        let mut out = vec![0.0; count];
        fill(seed, name, Init::Normal { std: 1.0 }, start, &mut out);
        out
    }

    fn correlation(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>() / a.len() as f64
    }

    #[test]
    fn philox_gives_the_published_vectors() {
        let _limit = testkit::time_limit(10);
        let run = |counter: [u32; 4], key| philox(counter.map(|w| [w; LANES]), key).map(|w| w[LANES - 1]);
        // Known answers of the authors' library (Random123, kat_vectors).
        assert_eq!(run([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(run([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            run([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn logarithm_sine_and_cosine_are_those_of_mathematics() {
        let _limit = testkit::time_limit(10);
        for i in 0..100_000u32 {
            let x = ((i * 83) as f32 + 0.5) / (1u32 << 23) as f32;
            let exact = f64::from(x).ln();
            assert!((f64::from(ln(x)) - exact).abs() < 1e-6 * exact.abs().max(0.1), "ln {x}: {} {exact}", ln(x));
            let word = i.wrapping_mul(2_654_435_769);
            let exact = f64::from(word) / 4_294_967_296.0 * std::f64::consts::TAU;
            let (sin, cos) = sin_cos_turns(word);
            assert!((f64::from(sin) - exact.sin()).abs() < 5e-7 && (f64::from(cos) - exact.cos()).abs() < 5e-7);
        }
    }

    #[test]
    fn any_run_of_elements_is_a_part_of_the_whole() {
        let _limit = testkit::time_limit(10);
        let whole = sample(7, "w", 0, 1000);
        for (start, count) in [(0, 1), (1, 63), (63, 2), (64, 64), (65, 200), (500, 500), (999, 1)] {
            assert_eq!(sample(7, "w", start, count), whole[start..start + count]);
        }
        // Beyond 2^32 elements the counter's second word counts.
        let far = sample(7, "w", (1 << 38) + 5, 100);
        assert_ne!(far, whole[5..105]);
    }

    #[test]
    fn values_are_fixed_for_ever() {
        let _limit = testkit::time_limit(10);
        // A change of these bits would make every seed mean another model.
        let bits: Vec<u32> = sample(1, "transformer.wte.weight", 0, 4).iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, [1_067_504_565, 3_201_792_085, 1_058_256_305, 1_049_909_177]);
    }

    #[test]
    fn moments_tails_and_neighbours_are_those_of_independent_normals() {
        let _limit = testkit::time_limit(30);
        const N: usize = 1 << 20;
        let x = sample(3, "w", 0, N);
        let moment = |power: i32| x.iter().map(|&v| f64::from(v).powi(power)).sum::<f64>() / N as f64;
        let sigma = 1.0 / (N as f64).sqrt();
        // Five standard errors each; the errors of the moments are 1, sqrt 2, sqrt 15 and sqrt 96.
        assert!(moment(1).abs() < 5.0 * sigma, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 5.0 * 2f64.sqrt() * sigma, "variance {}", moment(2));
        assert!(moment(3).abs() < 5.0 * 15f64.sqrt() * sigma, "third moment {}", moment(3));
        assert!((moment(4) - 3.0).abs() < 5.0 * 96f64.sqrt() * sigma, "fourth moment {}", moment(4));
        for lag in [1, 2, 15, 16, 17, 32, 48, 64, 128] {
            assert!(correlation(&x[..N - lag], &x[lag..]).abs() < 5.0 * sigma, "lag {lag}");
        }
        let beyond = x.iter().filter(|v| v.abs() > 3.0).count() as f64 / N as f64;
        assert!((beyond - 0.0027).abs() < 5.0 * 0.052 * sigma, "{beyond} beyond three deviations");
        assert!(x.iter().all(|v| v.is_finite() && v.abs() < 6.0));
    }

    #[test]
    fn names_and_seeds_give_streams_of_their_own() {
        let _limit = testkit::time_limit(10);
        const N: usize = 1 << 16;
        let base = sample(3, "h.1.w", 0, N);
        let others = [(4, "h.1.w"), (3, "h.2.w"), (3, "h.1.w2"), (3, ""), (3, "h.1.w\0"), (1 << 32 | 3, "h.1.w")];
        for (seed, name) in others {
            let other = sample(seed, name, 0, N);
            assert!(correlation(&base, &other).abs() < 5.0 / (N as f64).sqrt(), "seed {seed}, name {name:?}");
        }
    }

    #[test]
    fn constants_and_deviation_are_as_told() {
        let _limit = testkit::time_limit(10);
        let mut out = [5.0; 3];
        fill(1, "b", Init::Zeros, 0, &mut out);
        assert_eq!(out, [0.0; 3]);
        fill(1, "b", Init::Ones, 9, &mut out);
        assert_eq!(out, [1.0; 3]);
        let one = sample(1, "w", 0, 100);
        let mut scaled = vec![0.0; 100];
        fill(1, "w", Init::Normal { std: 0.02 }, 0, &mut scaled);
        assert!(one.iter().zip(&scaled).all(|(a, b)| 0.02 * a == *b));
    }
}
