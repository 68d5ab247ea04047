//! Element by element.

use crate::{Rope, RopeScaling};
use gpurun_types::{DType, Lane};

use super::{Cx, Room};

const LENGTHS: [usize; 5] = [1, 17, 257, 4096, 70_001];

/// `dst += src`.
pub fn add_assign(cx: &Cx<'_>) {
    for len in LENGTHS {
        let room = cx.room();
        let (src, dst) = (cx.normal(len, 1.0), cx.normal(len, 1.0));
        let want: Vec<f64> = src.iter().zip(&dst).map(|(s, d)| s + d).collect();
        let (src, dst) = (room.put(&src), room.put(&dst));
        cx.backend.add_assign(Lane::Compute, src, dst).expect("add_assign");
        cx.close("add_assign", &room, dst, &want, 1.0);
    }
}

fn gelu_of(x: f64) -> (f64, f64) {
    let a = (2.0 / std::f64::consts::PI).sqrt();
    let t = (a * (x + 0.044_715 * x * x * x)).tanh();
    let du = a * (1.0 + 3.0 * 0.044_715 * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du)
}

/// Forward, and backward with `dx` apart and over `dy`.
pub fn gelu(cx: &Cx<'_>) {
    for len in LENGTHS {
        let room = cx.room();
        let (mut x, dy) = (cx.normal(len, 2.0), cx.normal(len, 1.0));
        // Far out the function is the identity or zero, and nothing may overflow on the way.
        for (x, far) in x.iter_mut().skip(1).zip([40.0, -40.0, 0.0, 1000.0, -1000.0]) {
            *x = far;
        }
        let forward: Vec<f64> = x.iter().map(|x| gelu_of(*x).0).collect();
        let backward: Vec<f64> = x.iter().zip(&dy).map(|(x, dy)| dy * gelu_of(*x).1).collect();
        let (x, y, dy, dx) = (room.put(&x), room.blank(len), room.put(&dy), room.blank(len));
        cx.backend.gelu_forward(Lane::Compute, x, y).expect("gelu_forward");
        cx.close("gelu_forward", &room, y, &forward, 1.0);
        cx.backend.gelu_backward(Lane::Compute, x, dy, dx).expect("gelu_backward");
        cx.close("gelu_backward", &room, dx, &backward, 1.0);
        cx.backend.gelu_backward(Lane::Compute, x, dy, dy).expect("gelu_backward");
        assert_eq!(room.get_bytes(dx), room.get_bytes(dy), "gelu_backward in place");
    }
}

/// Forward, and backward with `dx` apart and over `x`.
pub fn swiglu(cx: &Cx<'_>) {
    for (rows, width) in [(1, 1), (1, 17), (37, 33), (5, 257), (130, 512)] {
        let room = cx.room();
        let (mut x, dy) = (cx.normal(2 * rows * width, 2.0), cx.normal(rows * width, 1.0));
        for (x, far) in x.iter_mut().zip([100.0, -100.0, 0.0]).take(width) {
            *x = far;
        }
        let (mut forward, mut backward) = (vec![0.0; rows * width], vec![0.0; 2 * rows * width]);
        for i in 0..rows {
            for j in 0..width {
                let (g, u, dy) = (x[2 * i * width + j], x[(2 * i + 1) * width + j], dy[i * width + j]);
                let s = 1.0 / (1.0 + (-g).exp());
                forward[i * width + j] = g * s * u;
                backward[2 * i * width + j] = dy * u * s * (1.0 + g * (1.0 - s));
                backward[(2 * i + 1) * width + j] = dy * g * s;
            }
        }
        let (x, y, dy, dx) = (room.put(&x), room.blank(rows * width), room.put(&dy), room.blank(2 * rows * width));
        cx.backend.swiglu_forward(Lane::Compute, x, y, rows, width).expect("swiglu_forward");
        cx.close("swiglu_forward", &room, y, &forward, 1.0);
        cx.backend.swiglu_backward(Lane::Compute, x, dy, dx, rows, width).expect("swiglu_backward");
        cx.close("swiglu_backward", &room, dx, &backward, 1.0);
        cx.backend.swiglu_backward(Lane::Compute, x, dy, x, rows, width).expect("swiglu_backward");
        assert_eq!(room.get_bytes(dx), room.get_bytes(x), "swiglu_backward in place");
    }
}

const LLAMA3: RopeScaling =
    RopeScaling { factor: 8.0, low_frequency: 1.0, high_frequency: 4.0, original_context: 64.0 };

/// Frequency of one pair of elements.
fn frequency(i: usize, args: &Rope) -> f64 {
    let plain = f64::from(args.theta).powf(-2.0 * i as f64 / args.head_dim as f64);
    let Some(s) = args.scaling else { return plain };
    let wavelength = 2.0 * std::f64::consts::PI / plain;
    let (factor, context) = (f64::from(s.factor), f64::from(s.original_context));
    let (low, high) = (f64::from(s.low_frequency), f64::from(s.high_frequency));
    if wavelength < context / high {
        plain
    } else if wavelength > context / low {
        plain / factor
    } else {
        let smooth = (context / wavelength - low) / (high - low);
        (1.0 - smooth) * plain / factor + smooth * plain
    }
}

fn rope_cases(cx: &Cx<'_>, check: impl Fn(&Room<'_>, Rope, &[f64], &[i32])) {
    // Sequences, tokens each, heads rotated, elements per head, heads not rotated.
    for (batch, seq, heads, head_dim, rest) in
        [(1, 1, 1, 2, 0), (2, 37, 3, 16, 3), (1, 130, 4, 64, 2), (3, 33, 1, 6, 0)]
    {
        for (theta, scaling) in [(10_000.0, None), (500_000.0, Some(LLAMA3))] {
            let (rows, stride) = (batch * seq, (heads + rest) * head_dim);
            let room = cx.room();
            let (x, starts) = (cx.normal(rows * stride, 1.0), cx.starts(batch, seq));
            let args = Rope {
                x: room.put(&x),
                starts: room.ints(&starts),
                rows,
                seq,
                heads,
                head_dim,
                stride,
                theta,
                scaling,
                inverse: false,
            };
            check(&room, args, &x, &starts);
        }
    }
}

/// Rotation of the leading heads; the others keep their bits.
pub fn rope(cx: &Cx<'_>) {
    rope_cases(cx, |room, args, x, starts| {
        let mut want = x.to_vec();
        let half = args.head_dim / 2;
        for (i, start) in starts.iter().enumerate() {
            let position = (i % args.seq) as f64 - f64::from(*start);
            for head in 0..args.heads {
                for pair in 0..half {
                    let (sin, cos) = (position * frequency(pair, &args)).sin_cos();
                    let at = i * args.stride + head * args.head_dim + pair;
                    want[at] = x[at] * cos - x[at + half] * sin;
                    want[at + half] = x[at + half] * cos + x[at] * sin;
                }
            }
        }
        cx.backend.rope(Lane::Compute, args).expect("rope");
        // Angles grow to hundreds of radians: their sine in fp32 may be off by 1e-5.
        cx.close(&format!("{args:?}"), room, args.x, &want, if cx.dtype == DType::F32 { 3.0 } else { 1.0 });
        let got = room.get(args.x);
        for (i, (got, x)) in got.iter().zip(x).enumerate() {
            assert!(i % args.stride < args.heads * args.head_dim || got == x, "element {i} is of no rotated head");
        }
    });
}

/// Rotating backward undoes it.
pub fn rope_inverse(cx: &Cx<'_>) {
    rope_cases(cx, |room, args, x, _| {
        cx.backend.rope(Lane::Compute, args).expect("rope");
        cx.backend.rope(Lane::Compute, Rope { inverse: true, ..args }).expect("rope");
        cx.close("rope there and back", room, args.x, x, 2.0);
    });
}
