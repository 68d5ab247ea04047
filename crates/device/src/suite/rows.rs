//! Row by row: embedding, norms, cross-entropy.

use gpurun_types::{DType, Lane, View};

use super::{Cx, Room, near, rounded, unit};
use crate::{CrossEntropy, Embedding, NormBackward, NormForward, NormKind};

/// Sequences, tokens each, vocabulary, width.
const TABLES: [[usize; 4]; 4] = [[1, 1, 1, 1], [2, 37, 257, 33], [3, 130, 17, 128], [1, 64, 1000, 17]];

fn tokens(cx: &Cx<'_>, len: usize, vocabulary: usize) -> Vec<i32> {
    (0..len).map(|_| cx.below(vocabulary) as i32).collect()
}

/// With and without positions, which start again with each document.
pub fn embedding_forward(cx: &Cx<'_>) {
    for [batch, seq, vocabulary, width] in TABLES {
        for positional in [false, true] {
            let room = cx.room();
            let (tokens, starts) = (tokens(cx, batch * seq, vocabulary), cx.starts(batch, seq));
            let table = cx.normal(vocabulary * width, 1.0);
            // More positions than a sequence has tokens are allowed.
            let positions = positional.then(|| cx.normal((seq + 3) * width, 1.0));
            let mut want = Vec::new();
            for (i, token) in tokens.iter().enumerate() {
                let position = i % seq - starts[i] as usize;
                want.extend((0..width).map(|j| {
                    table[*token as usize * width + j] + positions.as_ref().map_or(0.0, |p| p[position * width + j])
                }));
            }
            let args = Embedding {
                tokens: room.ints(&tokens),
                starts: room.ints(&starts),
                table: room.put(&table),
                positions: positions.map(|p| room.put(&p)),
                seq,
                width,
            };
            let y = room.blank(want.len());
            cx.backend.embedding_forward(Lane::Compute, args, y).expect("embedding_forward");
            cx.close(&format!("{args:?}"), &room, y, &want, 1.0);
        }
    }
}

/// Gradients are added to fp32 tables; a token may occur many times.
pub fn embedding_backward(cx: &Cx<'_>) {
    for [batch, seq, vocabulary, width] in TABLES {
        for positional in [false, true] {
            let room = cx.room();
            let (tokens, starts) = (tokens(cx, batch * seq, vocabulary), cx.starts(batch, seq));
            let dy = cx.normal(batch * seq * width, 1.0);
            let table = cx.normal_as(DType::F32, vocabulary * width, 1.0);
            let positions = positional.then(|| cx.normal_as(DType::F32, (seq + 3) * width, 1.0));
            let (mut dtable, mut dpositions) = (table.clone(), positions.clone().unwrap_or_default());
            for (i, token) in tokens.iter().enumerate() {
                let position = i % seq - starts[i] as usize;
                for j in 0..width {
                    dtable[*token as usize * width + j] += dy[i * width + j];
                    if positional {
                        dpositions[position * width + j] += dy[i * width + j];
                    }
                }
            }
            let args = Embedding {
                tokens: room.ints(&tokens),
                starts: room.ints(&starts),
                table: room.put_as(DType::F32, &table),
                positions: positions.map(|p| room.put_as(DType::F32, &p)),
                seq,
                width,
            };
            cx.backend.embedding_backward(Lane::Compute, args, room.put(&dy)).expect("embedding_backward");
            cx.close("table", &room, args.table, &dtable, 1.0);
            if let Some(positions) = args.positions {
                cx.close("positions", &room, positions, &dpositions, 1.0);
            }
        }
    }
}

const ROWS: [[usize; 2]; 6] = [[1, 2], [1, 17], [37, 33], [130, 64], [5, 257], [515, 128]];
const EPS: f32 = 1e-5;

/// Mean (0 for RMS) and reciprocal deviation of a row.
fn statistics(kind: NormKind, row: &[f64]) -> (f64, f64) {
    let width = row.len() as f64;
    let mean = if kind == NormKind::Layer { row.iter().sum::<f64>() / width } else { 0.0 };
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / width;
    (mean, 1.0 / (variance + f64::from(EPS)).sqrt())
}

fn kinds() -> [(NormKind, bool); 3] {
    [(NormKind::Layer, true), (NormKind::Layer, false), (NormKind::Rms, false)]
}

/// Rows whose mean is not zero.
fn activations(cx: &Cx<'_>, rows: usize, width: usize) -> Vec<f64> {
    let plain = cx.normal(rows * width, 1.0);
    rounded(&plain.iter().enumerate().map(|(i, x)| x + (i / width % 5) as f64 - 1.0).collect::<Vec<_>>(), cx.dtype)
}

/// Both norms, with and without bias and the residual addition.
pub fn norm_forward(cx: &Cx<'_>) {
    for [rows, width] in ROWS {
        for (kind, biased) in kinds() {
            for residual in [false, true] {
                norm_forward_case(cx, [rows, width], kind, biased, residual);
            }
        }
    }
}

fn norm_forward_case(cx: &Cx<'_>, [rows, width]: [usize; 2], kind: NormKind, biased: bool, residual: bool) {
    let room = cx.room();
    let x = activations(cx, rows, width);
    let residual = residual.then(|| cx.normal(rows * width, 1.0));
    let (weight, bias) = (cx.normal(width, 1.0), biased.then(|| cx.normal(width, 1.0)));
    let sum = residual
        .as_ref()
        .map_or_else(|| x.clone(), |r| rounded(&x.iter().zip(r).map(|(x, r)| x + r).collect::<Vec<_>>(), cx.dtype));
    let (mut y, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for row in sum.chunks(width) {
        let (mean, rstd) = statistics(kind, row);
        means.push(mean);
        rstds.push(rstd);
        let of = |j: usize| (row[j] - mean) * rstd * weight[j] + bias.as_ref().map_or(0.0, |b| b[j]);
        y.extend((0..width).map(of));
    }
    let args = NormForward {
        kind,
        x: room.put(&x),
        sum: residual.as_ref().map(|_| room.blank(rows * width)),
        residual: residual.map(|r| room.put(&r)),
        weight: room.put(&weight),
        bias: bias.map(|b| room.put(&b)),
        y: room.blank(rows * width),
        mean: (kind == NormKind::Layer).then(|| room.blank_as(DType::F32, rows)),
        rstd: room.blank_as(DType::F32, rows),
        rows,
        width,
        eps: EPS,
    };
    cx.backend.norm_forward(Lane::Compute, args).expect("norm_forward");
    let what = |name: &str| format!("{name} of norm_forward {kind:?} {rows} x {width}");
    cx.close(&what("y"), &room, args.y, &y, 1.0);
    cx.close(&what("rstd"), &room, args.rstd, &rstds, 1.0);
    if let Some(mean) = args.mean {
        cx.close(&what("mean"), &room, mean, &means, 1.0);
    }
    if let Some(view) = args.sum {
        cx.close(&what("sum"), &room, view, &sum, 1.0);
    }
}

/// Both norms, with and without bias and carry; `dx` apart, over `dy` and over `carry`.
pub fn norm_backward(cx: &Cx<'_>) {
    for [rows, width] in ROWS {
        for (kind, biased) in kinds() {
            for carried in [false, true] {
                norm_backward_case(cx, [rows, width], kind, biased, carried);
            }
        }
    }
}

/// Inputs of one gradient of a norm.
struct NormCase {
    kind: NormKind,
    width: usize,
    x: Vec<f64>,
    weight: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
    dy: Vec<f64>,
    carry: Option<Vec<f64>>,
    dweight: Vec<f64>,
    dbias: Option<Vec<f64>>,
}

impl NormCase {
    fn new(cx: &Cx<'_>, [rows, width]: [usize; 2], kind: NormKind, biased: bool, carried: bool) -> Self {
        let x = activations(cx, rows, width);
        let (mean, rstd): (Vec<f64>, Vec<f64>) = x.chunks(width).map(|row| statistics(kind, row)).unzip();
        Self {
            kind,
            width,
            x,
            weight: cx.normal(width, 1.0),
            mean: rounded(&mean, DType::F32),
            rstd: rounded(&rstd, DType::F32),
            dy: cx.normal(rows * width, 1.0),
            carry: carried.then(|| cx.normal(rows * width, 1.0)),
            dweight: cx.normal_as(DType::F32, width, 1.0),
            dbias: biased.then(|| cx.normal_as(DType::F32, width, 1.0)),
        }
    }

    /// `dx`, `dweight` and `dbias` after the operation.
    fn want(&self) -> (Vec<f64>, Vec<f64>, Option<Vec<f64>>) {
        let width = self.width;
        let (mut dx, mut dweight, mut dbias) = (Vec::new(), self.dweight.clone(), self.dbias.clone());
        for (i, (x, dy)) in self.x.chunks(width).zip(self.dy.chunks(width)).enumerate() {
            let xhat: Vec<f64> = x.iter().map(|x| (x - self.mean[i]) * self.rstd[i]).collect();
            let scaled: Vec<f64> = dy.iter().zip(&self.weight).map(|(d, w)| d * w).collect();
            let plain = if self.kind == NormKind::Layer { scaled.iter().sum::<f64>() / width as f64 } else { 0.0 };
            let weighted = scaled.iter().zip(&xhat).map(|(s, x)| s * x).sum::<f64>() / width as f64;
            for j in 0..width {
                let carry = self.carry.as_ref().map_or(0.0, |c| c[i * width + j]);
                dx.push((scaled[j] - plain - xhat[j] * weighted) * self.rstd[i] + carry);
                dweight[j] += dy[j] * xhat[j];
                if let Some(dbias) = &mut dbias {
                    dbias[j] += dy[j];
                }
            }
        }
        (dx, dweight, dbias)
    }

    fn place(&self, cx: &Cx<'_>, room: &Room<'_>) -> NormBackward {
        let (rows, width) = (self.x.len() / self.width, self.width);
        NormBackward {
            kind: self.kind,
            x: room.put(&self.x),
            weight: room.put(&self.weight),
            mean: (self.kind == NormKind::Layer).then(|| room.put_as(DType::F32, &self.mean)),
            rstd: room.put_as(DType::F32, &self.rstd),
            dy: room.put(&self.dy),
            carry: self.carry.as_ref().map(|c| room.put(c)),
            dx: room.blank(rows * width),
            dweight: room.put_as(DType::F32, &self.dweight),
            dbias: self.dbias.as_ref().map(|b| room.put_as(DType::F32, b)),
            scratch: room.scratch(cx.backend.norm_backward_scratch(rows, width)),
            rows,
            width,
        }
    }
}

fn norm_backward_case(cx: &Cx<'_>, [rows, width]: [usize; 2], kind: NormKind, biased: bool, carried: bool) {
    let room = cx.room();
    let case = NormCase::new(cx, [rows, width], kind, biased, carried);
    let (dx, dweight, dbias) = case.want();
    let args = case.place(cx, &room);
    let run = |args| cx.backend.norm_backward(Lane::Compute, args).expect("norm_backward");
    run(args);
    // With two elements dx is what is left of terms that cancel: the error is that of the terms.
    let factor = if width == 2 { 200.0 } else { 1.0 };
    let what = |name: &str| format!("{name} of norm_backward {kind:?} {rows} x {width}, carry {carried}");
    cx.close(&what("dx"), &room, args.dx, &dx, factor);
    cx.close(&what("dweight"), &room, args.dweight, &dweight, 1.0);
    if let (Some(view), Some(dbias)) = (args.dbias, dbias) {
        cx.close(&what("dbias"), &room, view, &dbias, 1.0);
    }
    let apart = room.get_bytes(args.dx);
    let over = |view: View, name: &str| {
        run(NormBackward { dx: view, ..args });
        assert_eq!(room.get_bytes(view), apart, "dx over {name}");
        room.set(view, if name == "dy" { &case.dy } else { case.carry.as_deref().unwrap_or_default() });
    };
    over(args.dy, "dy");
    if let Some(carry) = args.carry {
        over(carry, "carry");
    }
}

/// Losses and gradients, with ignored targets, with and without backward.
pub fn cross_entropy(cx: &Cx<'_>) {
    for [rows, vocabulary] in [[1, 1], [1, 17], [37, 257], [130, 33], [70, 1000], [2, 50_257]] {
        for ignored in [0, 3, 1] {
            for backward in [false, true] {
                let targets: Vec<i32> = (0..rows)
                    .map(|i| if ignored > 0 && i % ignored == 0 { -100 } else { cx.below(vocabulary) as i32 })
                    .collect();
                let logits = cx.normal(rows * vocabulary, 3.0);
                cross_entropy_case(cx, [rows, vocabulary], &logits, &targets, backward);
            }
        }
    }
}

fn cross_entropy_case(cx: &Cx<'_>, [rows, vocabulary]: [usize; 2], logits: &[f64], targets: &[i32], backward: bool) {
    const LOSS: f64 = 5.0;
    const SCALE: f64 = 1024.0;
    let room = cx.room();
    let (mut grad, mut loss) = (Vec::new(), LOSS);
    let factor = 1.0 / rows as f32;
    for (row, target) in logits.chunks(vocabulary).zip(targets) {
        let Ok(target) = usize::try_from(*target) else {
            grad.extend(std::iter::repeat_n(0.0, vocabulary));
            continue;
        };
        let highest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - highest).exp()).sum();
        loss += highest + sum.ln() - row[target];
        grad.extend(
            row.iter().enumerate().map(|(j, x)| {
                ((x - highest).exp() / sum - f64::from(u8::from(j == target))) * f64::from(factor) * SCALE
            }),
        );
    }
    let args = CrossEntropy {
        logits: room.put(logits),
        targets: room.ints(targets),
        loss: room.put_as(DType::F64, &[LOSS]),
        row_losses: room.blank_as(DType::F32, rows),
        scale: room.put_as(DType::F32, &[SCALE]),
        factor,
        rows,
        vocabulary,
        backward,
    };
    cx.backend.cross_entropy(Lane::Compute, args).expect("cross_entropy");
    let what = format!("cross_entropy {rows} x {vocabulary}");
    cx.close(&what, &room, args.loss, &[loss], 1.0);
    if backward {
        cx.close(&what, &room, args.logits, &grad, 1.0);
        // The targets' elements outweigh the others: look at those apart.
        let others = |values: &[f64]| -> Vec<f64> {
            let is_target = |n: usize| targets[n / vocabulary] == (n % vocabulary) as i32;
            (0..values.len()).filter(|n| !is_target(*n)).map(|n| values[n]).collect()
        };
        near(&what, &others(&room.get(args.logits)), &others(&grad), unit(cx.dtype));
    } else {
        assert_eq!(room.get(args.logits), logits, "logits keep their bits without backward");
    }
}

/// Large logits do not overflow; logits that are not finite give a loss and a gradient that are not.
pub fn cross_entropy_extremes(cx: &Cx<'_>) {
    let mut logits = vec![0.0; 3 * 40];
    (logits[0], logits[1], logits[45], logits[80]) = (60_000.0, -60_000.0, -60_000.0, 1_000.0);
    let logits = rounded(&logits, cx.dtype);
    cross_entropy_case(cx, [3, 40], &logits, &[0, 5, 0], true);
    cross_entropy_case(cx, [3, 40], &logits, &[1, 3, 7], true);
    for bad in [f64::NAN, f64::INFINITY] {
        let room = cx.room();
        let mut logits = vec![0.5; 2 * 40];
        logits[50] = bad;
        let args = CrossEntropy {
            logits: room.put(&logits),
            targets: room.ints(&[3, 3]),
            loss: room.put_as(DType::F64, &[0.0]),
            row_losses: room.blank_as(DType::F32, 2),
            scale: room.put_as(DType::F32, &[1.0]),
            factor: 1.0,
            rows: 2,
            vocabulary: 40,
            backward: true,
        };
        cx.backend.cross_entropy(Lane::Compute, args).expect("cross_entropy");
        assert!(!room.get(args.loss)[0].is_finite(), "a logit of {bad} makes the loss not finite");
        let grad = room.get(args.logits);
        assert!(grad[..40].iter().all(|g| g.is_finite()), "the other row is not touched");
        assert!(grad[40..].iter().any(|g| !g.is_finite()), "a logit of {bad} makes the gradient not finite");
    }
}
