//! Matrix products and column sums.

use crate::Matmul;
use gpurun_types::{DType, Lane};

use super::{Cx, near_terms, unit};

/// `[rows, columns]` to `[columns, rows]`.
fn transposed(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
}

/// `[m, k] [k, n]`.
fn product(a: &[f64], b: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let mut d = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            let left = a[i * k + l];
            for (d, b) in d[i * n..(i + 1) * n].iter_mut().zip(&b[l * n..(l + 1) * n]) {
                *d += left * b;
            }
        }
    }
    d
}

#[derive(Clone, Copy, Debug, Default)]
struct Variant {
    transpose_a: bool,
    transpose_b: bool,
    bias: bool,
    residual: bool,
    accumulate: bool,
    wide: bool,
}

fn check(cx: &Cx<'_>, [m, n, k]: [usize; 3], v: Variant) {
    let room = cx.room();
    let d_type = if v.wide { DType::F32 } else { cx.dtype };
    let (a, b) = (cx.normal(m * k, 1.0), cx.normal(k * n, 1.0 / (k as f64).sqrt()));
    let mut want = product(&a, &b, [m, n, k]);
    let turn = |x: &[f64], rows, columns, turn| if turn { transposed(x, rows, columns) } else { x.to_vec() };
    let bias = v.bias.then(|| cx.normal(n, 1.0));
    let residual = v.residual.then(|| cx.normal_as(d_type, m * n, 1.0));
    let before = v.accumulate.then(|| cx.normal_as(d_type, m * n, 1.0));
    // A library may round between two additions, so the error is measured against the terms: they may cancel.
    let mut terms: Vec<f64> = want.iter().map(|w| w.abs()).collect();
    for (i, (w, t)) in want.iter_mut().zip(&mut terms).enumerate() {
        let added = [
            bias.as_ref().map_or(0.0, |b| b[i % n]),
            residual.as_ref().map_or(0.0, |r| r[i]),
            before.as_ref().map_or(0.0, |b| b[i]),
        ];
        *w += added.iter().sum::<f64>();
        *t += added.iter().map(|a| a.abs()).sum::<f64>();
    }
    let args = Matmul {
        a: room.put(&turn(&a, m, k, v.transpose_a)),
        b: room.put(&turn(&b, k, n, v.transpose_b)),
        d: before.map_or_else(|| room.blank_as(d_type, m * n), |b| room.put_as(d_type, &b)),
        m,
        n,
        k,
        transpose_a: v.transpose_a,
        transpose_b: v.transpose_b,
        bias: bias.map(|b| room.put(&b)),
        residual: residual.map(|r| room.put_as(d_type, &r)),
        accumulate: v.accumulate,
    };
    cx.backend.matmul(Lane::Compute, args).expect("matmul");
    let what = format!("matmul {m} x {n} x {k} {v:?}");
    near_terms(&what, &room.get(args.d), &want, &terms, unit(args.d.dtype));
}

fn layouts() -> impl Iterator<Item = Variant> {
    (0..4).map(|i| Variant { transpose_a: i & 1 == 1, transpose_b: i & 2 == 2, ..Variant::default() })
}

/// Odd and even sizes in all layouts, with each of what may be added.
pub fn matmul(cx: &Cx<'_>) {
    for size in [[1, 1, 1], [1, 33, 17], [5, 3, 2], [37, 257, 32], [64, 1, 40], [77, 130, 65]] {
        for base in layouts() {
            for wide in [false, true] {
                let base = Variant { wide, ..base };
                check(cx, size, base);
                check(cx, size, Variant { accumulate: true, ..base });
                check(cx, size, Variant { bias: true, ..base });
                check(cx, size, Variant { residual: true, ..base });
                check(cx, size, Variant { bias: true, residual: true, ..base });
            }
        }
    }
}

/// Sizes at which work is cut into pieces.
pub fn matmul_large(cx: &Cx<'_>) {
    for base in layouts() {
        check(cx, [300, 260, 130], Variant { bias: true, residual: true, ..base });
        check(cx, [260, 130, 300], Variant { accumulate: true, wide: true, ..base });
        check(cx, [1030, 64, 64], base);
    }
}

/// Column sums, added to what is there.
pub fn bias_grad(cx: &Cx<'_>) {
    for (rows, columns) in [(1, 1), (1, 17), (17, 1), (37, 33), (1000, 257), (515, 128)] {
        let room = cx.room();
        let (dy, before) = (cx.normal(rows * columns, 1.0), cx.normal_as(DType::F32, columns, 1.0));
        let mut want = before.clone();
        for row in dy.chunks(columns) {
            want.iter_mut().zip(row).for_each(|(w, d)| *w += d);
        }
        let (dy, grad) = (room.put(&dy), room.put_as(DType::F32, &before));
        cx.backend.bias_grad(Lane::Compute, dy, grad, rows, columns).expect("bias_grad");
        cx.close(&format!("bias_grad {rows} x {columns}"), &room, grad, &want, 1.0);
    }
}
