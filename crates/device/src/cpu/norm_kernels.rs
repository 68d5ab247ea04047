//! Loops of the norms over blocks of fp32 rows.

use super::kernels::{sum16, vectorised};

/// Where a block's statistics go: means for layer norm only.
pub(super) struct Statistics<'a> {
    pub mean: Option<&'a mut [f32]>,
    pub rstd: &'a mut [f32],
    pub eps: f32,
}

/// A block of rows that was normalised: means for layer norm only.
pub(super) struct Rows<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub mean: Option<&'a [f32]>,
    pub rstd: &'a [f32],
}

vectorised! {
    /// `sum = x + y`.
    fn add(x: &[f32], y: &[f32], sum: &mut [f32]) {
        for ((sum, x), y) in sum.iter_mut().zip(x).zip(y) {
            *sum = *x + *y;
        }
    }

    /// `y = (x - mean) * rstd * weight (+ bias)` for each row.
    fn forward(x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32], to: Statistics<'_>) {
        let (width, mut mean) = (weight.len(), to.mean);
        for (i, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
            let mut center = 0.0;
            if let Some(mean) = &mut mean {
                center = sum16([x], |[x]| x) / width as f32;
                mean[i] = center;
            }
            let variance = sum16([x], |[x]| (x - center) * (x - center)) / width as f32;
            let rstd = 1.0 / (variance + to.eps).sqrt();
            to.rstd[i] = rstd;
            if let Some(bias) = bias {
                for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = (*x - center) * rstd * *w + *b;
                }
            } else {
                for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                    *y = (*x - center) * rstd * *w;
                }
            }
        }
    }

    /// `dx = (dy * w - mean(dy * w) - xhat * mean(dy * w * xhat)) * rstd`, over `dy`; the first mean is left out for RMS
    /// norm. Adds `dy * xhat` to `dweight` and `dy` to `dbias`.
    fn backward(rows: Rows<'_>, dy: &mut [f32], dweight: &mut [f32], dbias: &mut [f32]) {
        let width = rows.weight.len();
        let w = rows.weight;
        for (i, (x, dy)) in rows.x.chunks_exact(width).zip(dy.chunks_exact_mut(width)).enumerate() {
            let (center, rstd) = (rows.mean.map_or(0.0, |mean| mean[i]), rows.rstd[i]);
            let plain = match rows.mean {
                Some(_) => sum16([dy, w], |[dy, w]| dy * w) / width as f32,
                None => 0.0,
            };
            let weighted = sum16([dy, w, x], |[dy, w, x]| dy * w * ((x - center) * rstd)) / width as f32;
            for ((((dy, x), w), dw), db) in dy.iter_mut().zip(x).zip(w).zip(&mut *dweight).zip(&mut *dbias) {
                let xhat = (*x - center) * rstd;
                *dw += *dy * xhat;
                *db += *dy;
                *dy = (*dy * *w - plain - xhat * weighted) * rstd;
            }
        }
    }
}
