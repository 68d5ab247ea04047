//! Rotary position embedding.

use std::sync::{Arc, PoisonError};

use gpurun_types::DType;

use super::element::{Float, by_float};
use super::{CpuBackend, Result, float, is, kernels, length, shape};
use crate::{Rope, RopeScaling};

const OP: &str = "rope";

/// What the angles of a rotation depend on.
#[derive(Clone, Copy, PartialEq)]
struct Key {
    seq: usize,
    head_dim: usize,
    theta: f32,
    scaling: Option<RopeScaling>,
}

/// Cosines and sines for every position of a sequence: `[seq, head_dim / 2]` each.
pub(super) struct Angles {
    key: Key,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    fn new(key: Key) -> Self {
        let half = key.head_dim / 2;
        let frequencies: Vec<f64> = (0..half)
            .map(|i| {
                let plain = f64::from(key.theta).powf(-2.0 * i as f64 / key.head_dim as f64);
                key.scaling.map_or(plain, |s| scaled(plain, s))
            })
            .collect();
        let (sin, cos) = (0..key.seq)
            .flat_map(|position| frequencies.iter().map(move |frequency| (position as f64 * frequency).sin_cos()))
            .map(|(sin, cos)| (sin as f32, cos as f32))
            .unzip();
        Self { key, cos, sin }
    }
}

impl CpuBackend {
    pub(super) fn rope_op(&self, args: &Rope) -> Result {
        let Rope { x, rows, seq, heads, head_dim, stride, .. } = *args;
        float(OP, "x", x)?;
        length(OP, "x", x, rows * stride)?;
        is(OP, "starts", args.starts, DType::I32, rows)?;
        if !head_dim.is_multiple_of(2) || heads * head_dim > stride || seq == 0 || !rows.is_multiple_of(seq) {
            return Err(shape(OP, format!("{heads} heads of {head_dim} in rows of {stride}, {rows} rows of {seq}")));
        }
        by_float!(x, T => self.rope_rows::<T>(args));
        Ok(())
    }

    fn rope_rows<T: Float>(&self, args: &Rope) {
        let Rope { seq, heads, head_dim, stride, .. } = *args;
        let half = head_dim / 2;
        let angles = self.angles(Key { seq, head_dim, theta: args.theta, scaling: args.scaling });
        let starts = self.read::<i32>(args.starts);
        let shared = self.shared::<T>(args.x);
        self.rows(args.rows, heads * head_dim, |rows| {
            let mut wide = vec![0.0; heads * head_dim];
            for i in rows {
                let position = (i % seq).saturating_sub(starts[i].max(0) as usize);
                let at = position * half..(position + 1) * half;
                let (cos, sin) = (&angles.cos[at.clone()], &angles.sin[at]);
                T::update(shared.part(i * stride..i * stride + heads * head_dim), &mut wide, |row| {
                    for head in row.chunks_exact_mut(head_dim) {
                        let (a, b) = head.split_at_mut(half);
                        // Turning by the opposite angle is turning with the halves swapped.
                        if args.inverse { kernels::rotate(b, a, cos, sin) } else { kernels::rotate(a, b, cos, sin) }
                    }
                });
            }
        });
    }

    /// Angles are the same in every layer and step: they are computed once.
    fn angles(&self, key: Key) -> Arc<Angles> {
        let mut known = self.angles.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.iter().find(|angles| angles.key == key) {
            return Arc::clone(found);
        }
        let angles = Arc::new(Angles::new(key));
        known.push(Arc::clone(&angles));
        angles
    }
}

/// Llama 3.1's change of one frequency (Dubey et al. 2024).
fn scaled(frequency: f64, s: RopeScaling) -> f64 {
    let [factor, low, high, context] = [s.factor, s.low_frequency, s.high_frequency, s.original_context].map(f64::from);
    let wavelength = 2.0 * std::f64::consts::PI / frequency;
    if wavelength < context / high {
        return frequency;
    }
    if wavelength > context / low {
        return frequency / factor;
    }
    let smooth = (context / wavelength - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}
