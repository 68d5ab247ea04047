//! Norms, the decisions of a step, AdamW.

use gpurun_types::{Bytes, DType, Lane, Place, View};

use super::{Cx, Room, decoded, encoded};
use crate::{AdamW, LossScaling, ScalarSlot, StepScalars};

/// The order that [`crate::Backend::norm_partial`] documents.
fn square_sum(values: &[f64]) -> f64 {
    let mut total = 0.0;
    for run in values.chunks(4096) {
        let mut sums = [0.0; 8];
        for (i, v) in run.iter().enumerate() {
            sums[i % 8] += v * v;
        }
        total += ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    }
    total
}

/// Bit for bit, on the device and on the host.
pub fn norm_partial(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("a host arena");
    for len in [0, 1, 7, 8, 9, 17, 4095, 4096, 4097, 12_289, 70_001, 300_003] {
        let values = cx.normal_as(DType::F32, len, 0.3);
        for (lane, room) in [(Lane::Compute, cx.room()), (Lane::Host, cx.room_in(host))] {
            let (src, partial) = (room.put_as(DType::F32, &values), room.blank_as(DType::F64, 1));
            cx.backend.norm_partial(lane, src, partial).expect("norm_partial");
            let got = room.get(partial)[0];
            assert_eq!(
                got.to_bits(),
                square_sum(&values).to_bits(),
                "norm_partial of {len} elements on {lane} is {got}"
            );
        }
    }
    for (bad, place) in [(f64::INFINITY, 0), (f64::NEG_INFINITY, 5000), (f64::NAN, 9999)] {
        let room = cx.room();
        let mut values = vec![1.0; 10_000];
        values[place] = bad;
        let (src, partial) = (room.put_as(DType::F32, &values), room.blank_as(DType::F64, 1));
        cx.backend.norm_partial(Lane::Compute, src, partial).expect("norm_partial");
        assert!(!room.get(partial)[0].is_finite(), "a gradient of {bad} shows in the norm");
    }
}

/// Scalar state on the device, and the same computed here.
struct Steps<'a> {
    cx: &'a Cx<'a>,
    room: Room<'a>,
    args: StepScalars,
}

const SHARDS: usize = 2;
const UNITS: usize = 3;
const ROW: usize = 5;

impl<'a> Steps<'a> {
    fn new(cx: &'a Cx<'a>, clip: f32, loss_scale: f64, scaling: Option<LossScaling>) -> Self {
        let room = cx.room();
        let mut state = vec![0.0; ScalarSlot::COUNT];
        state[ScalarSlot::LossScale as usize] = loss_scale;
        let args = StepScalars {
            // Columns past the units are something else's.
            partials: room.put_as(DType::F64, &[f64::NAN; SHARDS * ROW]),
            shards: SHARDS,
            row: ROW,
            units: UNITS,
            scalars: room.put_as(DType::F32, &state),
            learning_rate: room.blank_as(DType::F32, 1),
            clip,
            beta1: 0.9,
            beta2: 0.95,
            scaling,
        };
        Self { cx, room, args }
    }

    /// One step with those sums of squares; the state after it.
    fn step(&self, partials: &[[f64; UNITS]; SHARDS], learning_rate: f64) -> impl Fn(ScalarSlot) -> f64 + use<> {
        for (shard, sums) in partials.iter().enumerate() {
            self.room.set(self.args.partials.slice(shard * ROW, UNITS), sums);
        }
        self.room.set(self.args.learning_rate, &[learning_rate]);
        self.cx.backend.step_scalars(Lane::Compute, self.args).expect("step_scalars");
        let state = self.room.get(self.args.scalars);
        move |slot| state[slot as usize]
    }
}

fn near(what: &str, got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-6 * want.abs(), "{what} is {got}, wanted {want}");
}

/// Norm, clipping and bias corrections over a few steps; a step that is not finite is skipped.
pub fn step_scalars(cx: &Cx<'_>) {
    for clip in [1.0, 100.0, f32::INFINITY] {
        let steps = Steps::new(cx, clip, 1.0, None);
        for t in 1..=5 {
            let partials = [[4.0 * f64::from(t), 1.0, 0.5], [0.25, 9.0, 2.0]];
            let got = steps.step(&partials, 1e-3 * f64::from(t));
            let norm = partials.iter().flatten().sum::<f64>().sqrt();
            near("norm", got(ScalarSlot::GradNorm), norm);
            near("factor", got(ScalarSlot::GradFactor), (f64::from(clip) / (norm + 1e-6)).min(1.0));
            near("learning rate", got(ScalarSlot::LearningRate), 1e-3 * f64::from(t));
            near("c1", got(ScalarSlot::BiasCorrection1), 1.0 - f64::from(0.9f32).powi(t));
            near("c2", got(ScalarSlot::BiasCorrection2Sqrt), (1.0 - f64::from(0.95f32).powi(t)).sqrt());
            let rest = [ScalarSlot::AdamSteps, ScalarSlot::Skip, ScalarSlot::LossScale, ScalarSlot::UsedLossScale];
            assert_eq!(rest.map(&got), [f64::from(t), 0.0, 1.0, 1.0]);
        }
        for (bad, times) in [(f64::INFINITY, 1.0), (f64::NAN, 2.0)] {
            let got = steps.step(&[[1.0, bad, 1.0], [1.0; 3]], 1e-3);
            let slots = [ScalarSlot::Skip, ScalarSlot::AdamSteps, ScalarSlot::SkippedSteps, ScalarSlot::SkippedInARow];
            assert_eq!(slots.map(&got), [1.0, 5.0, times, times]);
            assert_eq!(got(ScalarSlot::LossScale), 1.0);
        }
        let got = steps.step(&[[1.0; 3]; 2], 1e-3);
        let slots = [ScalarSlot::Skip, ScalarSlot::AdamSteps, ScalarSlot::SkippedSteps, ScalarSlot::SkippedInARow];
        assert_eq!(slots.map(&got), [0.0, 6.0, 2.0, 0.0]);
    }
}

/// The loss scale grows after good steps, backs off on overflow, and stays within its bounds.
pub fn loss_scaling(cx: &Cx<'_>) {
    let scaling = LossScaling { growth: 2.0, backoff: 0.5, interval: 3, max: 64.0, min: 8.0 };
    let steps = Steps::new(cx, 1.0, 16.0, Some(scaling));
    let mut scale = 16.0;
    // Good or not, and the scale after the step.
    let script = [
        (true, 16.0),
        (true, 16.0),
        (true, 32.0),
        (true, 32.0),
        (false, 16.0),
        (true, 16.0),
        (true, 16.0),
        (true, 32.0),
        (true, 32.0),
        (true, 32.0),
        (true, 64.0),
        (true, 64.0),
        (true, 64.0),
        (true, 64.0),
        (false, 32.0),
        (false, 16.0),
        (false, 8.0),
        (false, 8.0),
        (true, 8.0),
        (true, 8.0),
        (true, 16.0),
    ];
    for (i, (good, after)) in script.into_iter().enumerate() {
        let unscaled = 25.0;
        let sum = if good { unscaled * scale * scale } else { f64::INFINITY };
        let got = steps.step(&[[sum, 0.0, 0.0], [0.0; 3]], 1e-3);
        assert_eq!(got(ScalarSlot::Skip), f64::from(u8::from(!good)), "step {i}");
        assert_eq!(got(ScalarSlot::UsedLossScale), scale, "step {i}");
        assert_eq!(got(ScalarSlot::LossScale), after, "step {i}");
        if good {
            near("norm", got(ScalarSlot::GradNorm), 5.0);
            near("factor", got(ScalarSlot::GradFactor), 1.0 / (5.0 + 1e-6) / scale);
        }
        scale = after;
    }
}

/// Constants of one step.
fn state(skip: bool) -> Vec<f64> {
    let mut state = vec![f64::NAN; ScalarSlot::COUNT];
    let mut set = |slot: ScalarSlot, value| state[slot as usize] = value;
    set(ScalarSlot::Skip, f64::from(u8::from(skip)));
    set(ScalarSlot::GradFactor, 0.37);
    set(ScalarSlot::LearningRate, 3e-3);
    set(ScalarSlot::BiasCorrection1, 1.0 - 0.9f64.powi(3));
    set(ScalarSlot::BiasCorrection2Sqrt, (1.0 - 0.95f64.powi(3)).sqrt());
    state
}

/// Master, first and second moment, gradient.
fn parameters(cx: &Cx<'_>, len: usize, grad: DType) -> [Vec<f64>; 4] {
    let draw = |deviation| cx.normal_as(DType::F32, len, deviation);
    let v = draw(0.1).iter().map(|v| f64::from((v * v) as f32)).collect();
    [draw(1.0), draw(0.1), v, cx.normal_as(grad, len, 0.5)]
}

fn place(cx: &Cx<'_>, room: &Room<'_>, values: &[Vec<f64>; 4], grad: DType, skip: bool) -> AdamW {
    let [master, m, v, gradient] = values;
    let put = |values: &[f64]| room.put_as(DType::F32, values);
    AdamW {
        master: put(master),
        m: put(m),
        v: put(v),
        grad: room.put_as(grad, gradient),
        weight: (cx.dtype != DType::F32).then(|| room.blank(master.len())),
        scalars: put(&state(skip)),
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    }
}

/// One element, every operation rounded to fp32 by itself, in the order that [`AdamW`] documents.
fn plain(args: &AdamW, state: &[f32], [w, m, v, g]: [f32; 4]) -> [f32; 3] {
    let slot = |s: ScalarSlot| state[s as usize];
    let g = g * slot(ScalarSlot::GradFactor);
    let (rest1, rest2) = (1.0 - args.beta1, 1.0 - args.beta2);
    let (kept, new) = (args.beta1 * m, rest1 * g);
    let m = kept + new;
    let (kept, square) = (args.beta2 * v, g * g);
    let v = kept + rest2 * square;
    let root = v.sqrt() / slot(ScalarSlot::BiasCorrection2Sqrt);
    let update = (m / slot(ScalarSlot::BiasCorrection1)) / (root + args.eps);
    let decayed = args.weight_decay * w;
    [w - slot(ScalarSlot::LearningRate) * (update + decayed), m, v]
}

/// The same in fp64.
fn exact(args: &AdamW, state: &[f64], [w, m, v, g]: [f64; 4]) -> [f64; 3] {
    let [beta1, beta2, eps, decay] = [args.beta1, args.beta2, args.eps, args.weight_decay].map(f64::from);
    let slot = |s: ScalarSlot| state[s as usize];
    let g = g * slot(ScalarSlot::GradFactor);
    let (m, v) = (beta1 * m + (1.0 - beta1) * g, beta2 * v + (1.0 - beta2) * g * g);
    let update = m / slot(ScalarSlot::BiasCorrection1) / (v.sqrt() / slot(ScalarSlot::BiasCorrection2Sqrt) + eps);
    [w - slot(ScalarSlot::LearningRate) * (update + decay * w), m, v]
}

/// Bit for bit as plain fp32 arithmetic, near fp64, on the device and on the host.
pub fn adamw(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("a host arena");
    use DType::{Bf16, F32};
    for (len, grad) in [(1, F32), (17, Bf16), (257, F32), (4097, Bf16), (4096, F32), (70_001, F32)] {
        for (lane, room) in [(Lane::Compute, cx.room()), (Lane::Host, cx.room_in(host))] {
            let values = parameters(cx, len, grad);
            let args = place(cx, &room, &values, grad, false);
            cx.backend.adamw(lane, args).expect("adamw");
            let after = [args.master, args.m, args.v].map(|view| room.get(view));
            let scalars = decoded(&encoded(&state(false), DType::F32), DType::F32);
            let narrow: Vec<f32> = scalars.iter().map(|v| *v as f32).collect();
            let mut want = [const { Vec::new() }; 3];
            for i in 0..len {
                let element = [0, 1, 2, 3].map(|j| values[j][i]);
                let bits = plain(&args, &narrow, element.map(|v| v as f32));
                for (j, name) in ["master", "m", "v"].into_iter().enumerate() {
                    let got = after[j][i] as f32;
                    assert_eq!(got.to_bits(), bits[j].to_bits(), "{name}[{i}] is {got}, plain fp32 gives {}", bits[j]);
                }
                exact(&args, &scalars, element).into_iter().zip(&mut want).for_each(|(v, w)| w.push(v));
            }
            for (view, want) in [args.master, args.m, args.v].into_iter().zip(&want) {
                cx.close("adamw", &room, view, want, 1.0);
            }
            holds_rounded_master(&room, &args);
        }
    }
}

/// The weight is the master rounded to its type, bit for bit.
fn holds_rounded_master(room: &Room<'_>, args: &AdamW) {
    let Some(weight) = args.weight else { return };
    let want = encoded(&room.get(args.master), weight.dtype);
    assert!(room.get_bytes(weight) == want, "the weight is the rounded master");
}

/// A skipped step changes no state, whatever the gradient holds, and writes the weight all the same.
pub fn adamw_skip(cx: &Cx<'_>) {
    for len in [1, 17, 40_000] {
        let room = cx.room();
        let mut values = parameters(cx, len, DType::F32);
        values[3].fill(f64::NAN);
        let args = place(cx, &room, &values, DType::F32, true);
        let states: [View; 3] = [args.master, args.m, args.v];
        let before = states.map(|view| room.get_bytes(view));
        cx.backend.adamw(Lane::Compute, args).expect("adamw");
        assert!(states.map(|view| room.get_bytes(view)) == before, "a skipped step changes no state");
        holds_rounded_master(&room, &args);
    }
}
