//! AdamW at the speed of memory: blocks of a few cache lines, widened, stepped and rounded while they are in registers, with
//! the lines that come next on their way.

use std::ops::Range;

use gpurun_types::DType;
use half::{bf16, f16};
use multiversion::multiversion;

use super::element::{Float, by_float};
use super::{CpuBackend, Result, Shared};
use crate::{AdamRun, AdamW, ScalarSlot};

/// Elements of a block.
const BLOCK: usize = 64;
/// How many elements ahead memory is asked for: hardware does not look past the end of a page of 4 KiB, and four to seven
/// arrays at once are more than it follows well.
const AHEAD: usize = 4 * BLOCK;
/// Elements of a piece of work: long enough that its start costs nothing beside it.
const PIECE: usize = 32 * 1024;

/// What is the same for all elements of a step.
#[derive(Clone, Copy)]
struct Step {
    factor: f32,
    lr: f32,
    /// `1 / c1` and `1 / c2`.
    r1: f32,
    r2: f32,
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    number: u64,
    skip: bool,
}

impl Step {
    fn new(args: &AdamW<'_>, scalars: &[f32]) -> Self {
        let slot = |s: ScalarSlot| scalars[s as usize];
        Self {
            factor: slot(ScalarSlot::GradFactor),
            lr: slot(ScalarSlot::LearningRate),
            r1: 1.0 / slot(ScalarSlot::BiasCorrection1),
            r2: 1.0 / slot(ScalarSlot::BiasCorrection2Sqrt),
            beta1: args.beta1,
            beta2: args.beta2,
            rest1: 1.0 - args.beta1,
            rest2: 1.0 - args.beta2,
            eps: args.eps,
            number: slot(ScalarSlot::AdamSteps) as u64,
            skip: slot(ScalarSlot::Skip) == 1.0,
        }
    }
}

/// How a block of a type is read and written; inlined, so that it is compiled for the vectors at hand.
trait Lanes: Float + Default {
    fn widen(src: &[Self; BLOCK], dst: &mut [f32; BLOCK]);
    fn narrow(src: &[f32; BLOCK], dst: &mut [Self; BLOCK]);
}

impl Lanes for f32 {
    #[inline(always)]
    fn widen(src: &[Self; BLOCK], dst: &mut [f32; BLOCK]) {
        *dst = *src;
    }

    #[inline(always)]
    fn narrow(src: &[f32; BLOCK], dst: &mut [Self; BLOCK]) {
        *dst = *src;
    }
}

impl Lanes for bf16 {
    #[inline(always)]
    fn widen(src: &[Self; BLOCK], dst: &mut [f32; BLOCK]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = f32::from_bits(u32::from(s.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(src: &[f32; BLOCK], dst: &mut [Self; BLOCK]) {
        for (d, s) in dst.iter_mut().zip(src) {
            // Half of the last kept bit, less one when that bit is even: ties go to even.
            *d = cut(*s, 0x7fff + ((s.to_bits() >> 16) & 1));
        }
    }
}

impl Lanes for f16 {
    #[inline(always)]
    fn widen(src: &[Self; BLOCK], dst: &mut [f32; BLOCK]) {
        Self::load(src, dst);
    }

    #[inline(always)]
    fn narrow(src: &[f32; BLOCK], dst: &mut [Self; BLOCK]) {
        Self::store(src, dst);
    }
}

/// The upper half of the bits of `x + add`; a NaN, which could become an infinity, stays one.
#[inline(always)]
fn cut(x: f32, add: u32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(add) >> 16;
    bf16::from_bits(if x.is_nan() { (bits >> 16) | 0x40 } else { rounded } as u16)
}

/// A type that moments are stored in.
trait Moment: Lanes {
    /// Rounds a block; `random` has 16 random bits for each element, in its low or its high half.
    fn round<const HIGH: bool>(src: &[f32; BLOCK], dst: &mut [Self; BLOCK], random: &[u32; BLOCK]);
    /// Random bits are needed.
    const RANDOM: bool;
}

impl Moment for f32 {
    const RANDOM: bool = false;

    #[inline(always)]
    fn round<const HIGH: bool>(src: &[f32; BLOCK], dst: &mut [Self; BLOCK], _random: &[u32; BLOCK]) {
        *dst = *src;
    }
}

impl Moment for bf16 {
    const RANDOM: bool = true;

    #[inline(always)]
    fn round<const HIGH: bool>(src: &[f32; BLOCK], dst: &mut [Self; BLOCK], random: &[u32; BLOCK]) {
        for ((d, s), r) in dst.iter_mut().zip(src).zip(random) {
            *d = cut(*s, if HIGH { *r >> 16 } else { *r & 0xffff });
        }
    }
}

/// The bits of elements `first..`; see [`crate::RoundingKey`].
#[inline(always)]
fn random_bits(first: u64, [low, high]: [u32; 2], out: &mut [u32; BLOCK]) {
    // In 32 bits throughout: those of 64 take twice the vectors. The high half changes where the low one wraps.
    const CARRY: u32 = 0x85eb_ca6b;
    let base = first as u32;
    let add = ((first >> 32) as u32).wrapping_mul(CARRY).wrapping_add(low);
    for (i, out) in out.iter_mut().enumerate() {
        let at = base.wrapping_add(i as u32);
        let x = at.wrapping_add(add).wrapping_add(if at < base { CARRY } else { 0 });
        let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d) ^ high;
        let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        *out = x ^ (x >> 16);
    }
}

/// The arrays of one run, or of a stretch of it.
struct Arrays<'a, G, M, W> {
    grad: &'a [G],
    master: &'a mut [f32],
    m: &'a mut [M],
    v: &'a mut [M],
    weight: Option<&'a mut [W]>,
}

/// One block.
#[inline(always)]
fn block<G: Lanes, M: Moment, W: Lanes>(
    s: &Step,
    decay: f32,
    first: u64,
    key: [u32; 2],
    grad: &[G; BLOCK],
    master: &mut [f32; BLOCK],
    (m, v): (&mut [M; BLOCK], &mut [M; BLOCK]),
) {
    let (mut g, mut m_new, mut v_new) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    G::widen(grad, &mut g);
    M::widen(m, &mut m_new);
    M::widen(v, &mut v_new);
    for i in 0..BLOCK {
        let g = g[i] * s.factor;
        let m = s.beta1 * m_new[i] + s.rest1 * g;
        let v = s.beta2 * v_new[i] + s.rest2 * (g * g);
        let update = (m * s.r1) / (v.sqrt() * s.r2 + s.eps);
        master[i] -= s.lr * (update + decay * master[i]);
        (m_new[i], v_new[i]) = (m, v);
    }
    let mut random = [0; BLOCK];
    if M::RANDOM {
        random_bits(first, key, &mut random);
    }
    M::round::<false>(&m_new, m, &random);
    M::round::<true>(&v_new, v, &random);
}

/// Asks for the cache lines of a block `AHEAD` of `at`. Past the end of the memory that does nothing.
#[inline(always)]
fn prefetch<T>(at: &[T; BLOCK]) {
    let ahead = at.as_ptr().wrapping_add(AHEAD).cast::<i8>();
    for line in 0..std::mem::size_of::<[T; BLOCK]>() / 64 {
        let line = ahead.wrapping_add(64 * line);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch reads nothing that the program sees and never faults.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line);
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{line}]", line = in(reg) line, options(nostack, readonly, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = line;
    }
}

/// A stretch of whole blocks.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn blocks<G: Lanes, M: Moment, W: Lanes>(s: &Step, decay: f32, first: u64, key: [u32; 2], arrays: Arrays<'_, G, M, W>) {
    let Arrays { grad, master, m, v, weight } = arrays;
    let (grad, _) = grad.as_chunks::<BLOCK>();
    let (master, _) = master.as_chunks_mut::<BLOCK>();
    let (m, _) = m.as_chunks_mut::<BLOCK>();
    let (v, _) = v.as_chunks_mut::<BLOCK>();
    let mut weight = weight.map(|w| w.as_chunks_mut::<BLOCK>().0.iter_mut());
    for (i, (((grad, master), m), v)) in grad.iter().zip(master).zip(m).zip(v).enumerate() {
        if !s.skip {
            prefetch(grad);
            prefetch(master);
            prefetch(m);
            prefetch(v);
            block::<G, M, W>(s, decay, first + (i * BLOCK) as u64, key, grad, master, (m, v));
        }
        if let Some(weight) = weight.as_mut().and_then(Iterator::next) {
            W::narrow(master, weight);
        }
    }
}

/// Fewer elements than a block, in a block of their own.
fn rest<G: Lanes, M: Moment, W: Lanes>(s: &Step, decay: f32, first: u64, key: [u32; 2], arrays: Arrays<'_, G, M, W>) {
    let len = arrays.master.len();
    if len == 0 {
        return;
    }
    let mut grad = [G::default(); BLOCK];
    let mut master = [0.0; BLOCK];
    let (mut m, mut v) = ([M::default(); BLOCK], [M::default(); BLOCK]);
    let mut weight = [W::default(); BLOCK];
    grad[..len].copy_from_slice(arrays.grad);
    master[..len].copy_from_slice(arrays.master);
    m[..len].copy_from_slice(arrays.m);
    v[..len].copy_from_slice(arrays.v);
    let padded = Arrays {
        grad: &grad,
        master: &mut master,
        m: &mut m,
        v: &mut v,
        weight: arrays.weight.is_some().then_some(&mut weight[..]),
    };
    blocks(s, decay, first, key, padded);
    arrays.master.copy_from_slice(&master[..len]);
    arrays.m.copy_from_slice(&m[..len]);
    arrays.v.copy_from_slice(&v[..len]);
    if let Some(to) = arrays.weight {
        to.copy_from_slice(&weight[..len]);
    }
}

/// The run's elements `range`, as slices.
struct Views<'a, G, M, W> {
    grad: &'a [G],
    master: Shared<f32>,
    m: Shared<M>,
    v: Shared<M>,
    weight: Option<Shared<W>>,
}

impl<G: Lanes, M: Moment, W: Lanes> Views<'_, G, M, W> {
    fn part(&self, r: Range<usize>) -> Arrays<'_, G, M, W> {
        Arrays {
            grad: &self.grad[r.clone()],
            master: self.master.part(r.clone()),
            m: self.m.part(r.clone()),
            v: self.v.part(r.clone()),
            weight: self.weight.as_ref().map(|w| w.part(r)),
        }
    }

    /// Steps elements `r`: whole blocks from the first that begins with a cache line of the master.
    fn step(&self, s: &Step, run: &AdamRun, r: Range<usize>) {
        let key = run.rounding.of_step(s.number);
        let first = |at: usize| run.rounding.at(at).first;
        let head = self.master.from(r.start).0.align_offset(64).min(r.len());
        let (begin, end) = (r.start + head, r.start + head + (r.len() - head) / BLOCK * BLOCK);
        rest(s, run.weight_decay, first(r.start), key, self.part(r.start..begin));
        blocks(s, run.weight_decay, first(begin), key, self.part(begin..end));
        rest(s, run.weight_decay, first(end), key, self.part(end..r.end));
    }
}

impl CpuBackend {
    pub(super) fn adamw_op(&self, args: &AdamW<'_>) -> Result {
        let Some(types) = args.types()? else { return Ok(()) };
        let run = args.runs[0];
        by_float!(run.grad, G => match run.weight {
            None => self.adamw_moments::<G, f32>(args, types.moment),
            Some(weight) => by_float!(weight, W => self.adamw_moments::<G, W>(args, types.moment)),
        });
        Ok(())
    }

    fn adamw_moments<G: Lanes, W: Lanes>(&self, args: &AdamW<'_>, moment: DType) {
        match moment {
            DType::Bf16 => self.adamw_runs::<G, bf16, W>(args),
            _ => self.adamw_runs::<G, f32, W>(args),
        }
    }

    /// All runs, end to end, in pieces that may span several of them.
    fn adamw_runs<G: Lanes, M: Moment, W: Lanes>(&self, args: &AdamW<'_>) {
        let step = Step::new(args, self.read::<f32>(args.scalars));
        let runs: Vec<Views<'_, G, M, W>> = args.runs.iter().map(|run| self.views_of(run)).collect();
        let mut starts = vec![0];
        for run in args.runs {
            starts.push(starts[starts.len() - 1] + run.master.len);
        }
        self.pieces(starts[args.runs.len()], PIECE, |piece| {
            let mut index = starts.partition_point(|start| *start <= piece.start) - 1;
            while index < runs.len() && starts[index] < piece.end {
                let (from, to) = (piece.start.max(starts[index]), piece.end.min(starts[index + 1]));
                runs[index].step(&step, &args.runs[index], from - starts[index]..to - starts[index]);
                index += 1;
            }
        });
    }

    fn views_of<G: Lanes, M: Moment, W: Lanes>(&self, run: &AdamRun) -> Views<'_, G, M, W> {
        Views {
            grad: self.read(run.grad),
            master: self.shared(run.master),
            m: self.shared(run.m),
            v: self.shared(run.v),
            weight: run.weight.map(|w| self.shared(w)),
        }
    }
}
