//! Sums of several runs, in the order they are given: the same bits on every rank and in every run.

use gpurun_types::DType;
use half::{bf16, f16};

/// What happens to the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    /// It replaces what is there.
    Set,
    /// It is formed first, then added.
    Add,
}

/// Elements summed at a time: stays in the first-level cache.
const BLOCK: usize = 1024;

/// `dst = sum of terms` or `dst += ..` over `len` elements. `dst` may be one of the terms.
pub(crate) fn sum(terms: &[*const u8], dst: *mut u8, len: usize, dtype: DType, how: Sum) {
    match dtype {
        DType::F32 => typed::<f32, f32>(terms, dst, len, how),
        DType::F64 => typed::<f64, f64>(terms, dst, len, how),
        DType::Bf16 => typed::<bf16, f32>(terms, dst, len, how),
        DType::F16 => typed::<f16, f32>(terms, dst, len, how),
        DType::I32 => unreachable!("refused before"),
    }
}

/// A stored type that is summed as `A`.
trait Term<A>: Copy {
    fn widen(self) -> A;
    fn narrow(sum: A) -> Self;
}

macro_rules! term {
    ($stored:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Term<$sum> for $stored {
            #[inline(always)]
            fn widen(self) -> $sum {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }
        }
    };
}
term!(f32, f32, |x| x, |x| x);
term!(f64, f64, |x| x, |x| x);
term!(bf16, f32, bf16::to_f32, bf16::from_f32);
term!(f16, f32, f16::to_f32, f16::from_f32);

fn typed<T: Term<A>, A: Copy + Default + std::ops::AddAssign>(terms: &[*const u8], dst: *mut u8, len: usize, how: Sum) {
    let mut sums = [A::default(); BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let n = BLOCK.min(len - start);
        let sums = &mut sums[..n];
        for (i, term) in terms.iter().enumerate() {
            // SAFETY: every term has `len` elements that nobody writes meanwhile; arenas and chunks are aligned to at least
            // the element. `dst` is written only after this block of every term has been read.
            let term = unsafe { std::slice::from_raw_parts(term.cast::<T>().add(start), n) };
            if i == 0 {
                sums.iter_mut().zip(term).for_each(|(s, t)| *s = t.widen());
            } else {
                sums.iter_mut().zip(term).for_each(|(s, t)| *s += t.widen());
            }
        }
        // SAFETY: `dst` has `len` elements that only this call touches; no slice of a term is alive here.
        let out = unsafe { std::slice::from_raw_parts_mut(dst.cast::<T>().add(start), n) };
        match how {
            Sum::Set => out.iter_mut().zip(&*sums).for_each(|(o, s)| *o = T::narrow(*s)),
            Sum::Add => out.iter_mut().zip(&*sums).for_each(|(o, s)| {
                let mut total = o.widen();
                total += *s;
                *o = T::narrow(total);
            }),
        }
    }
}
