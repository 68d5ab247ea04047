//! Norms, the decisions of a step, AdamW.

use gpurun_types::{Bytes, DType, Lane, Place, View};

use super::{Cx, Room, decoded, encoded};
use crate::{AdamRun, AdamW, LossScaling, NormRun, RoundingKey, ScalarSlot, StepScalars};

/// Adds up as [`crate::Backend::norm_partial`] documents: in turn into `N` sums, then by halves.
fn in_turn<const N: usize>(values: impl Iterator<Item = f64>) -> f64 {
    let mut sums = [0.0; N];
    values.enumerate().for_each(|(i, v)| sums[i % N] += v);
    let mut left = N;
    while left > 1 {
        left /= 2;
        (0..left).for_each(|i| sums[i] += sums[i + left]);
    }
    sums[0]
}

fn square_sum(values: &[f64]) -> f64 {
    in_turn::<256>(values.chunks(4096).map(|piece| in_turn::<32>(piece.iter().map(|v| v * v))))
}

/// Bit for bit, on the device and on the host, one run at a time and many at once.
pub fn norm_partial(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("a host arena");
    let few = [0, 1, 31, 32, 33, 65, 4095, 4096, 4097, 12_289, 70_001, 1_300_003];
    // More than one launch takes.
    let many: Vec<usize> = (0..300).map(|i| (i * i) % 9001).collect();
    for lengths in [&few[..], &many] {
        let values: Vec<Vec<f64>> = lengths.iter().map(|len| cx.normal_as(DType::F32, *len, 0.3)).collect();
        for (lane, room) in [(Lane::Compute, cx.room()), (Lane::Host, cx.room_in(host))] {
            let run = |values: &Vec<f64>| NormRun {
                src: room.put_as(DType::F32, values),
                partial: room.blank_as(DType::F64, 1),
            };
            let runs: Vec<NormRun> = values.iter().map(run).collect();
            let check = || {
                for (run, values) in runs.iter().zip(&values) {
                    let (got, want) = (room.get(run.partial)[0], square_sum(values));
                    let len = values.len();
                    assert_eq!(got.to_bits(), want.to_bits(), "norm_partial of {len} elements on {lane} is {got}");
                    room.set(run.partial, &[f64::NAN]);
                }
            };
            cx.backend.norm_partial(lane, &runs).expect("norm_partial");
            check();
            runs.iter().for_each(|run| cx.backend.norm_partial(lane, &[*run]).expect("norm_partial"));
            check();
        }
    }
    for (bad, place) in [(f64::INFINITY, 0), (f64::NEG_INFINITY, 5000), (f64::NAN, 9999)] {
        let room = cx.room();
        let mut values = vec![1.0; 10_000];
        values[place] = bad;
        let run = NormRun { src: room.put_as(DType::F32, &values), partial: room.blank_as(DType::F64, 1) };
        cx.backend.norm_partial(Lane::Compute, &[run]).expect("norm_partial");
        assert!(!room.get(run.partial)[0].is_finite(), "a gradient of {bad} shows in the norm");
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

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.95;
const EPS: f32 = 1e-8;
/// Adam's count of steps in these tests.
const STEP: u64 = 3;

/// Constants of one step.
fn state(skip: bool) -> Vec<f64> {
    let mut state = vec![f64::NAN; ScalarSlot::COUNT];
    let mut set = |slot: ScalarSlot, value| state[slot as usize] = value;
    set(ScalarSlot::Skip, f64::from(u8::from(skip)));
    set(ScalarSlot::AdamSteps, STEP as f64);
    set(ScalarSlot::GradFactor, 0.37);
    set(ScalarSlot::LearningRate, 3e-3);
    set(ScalarSlot::BiasCorrection1, 1.0 - 0.9f64.powi(3));
    set(ScalarSlot::BiasCorrection2Sqrt, (1.0 - 0.95f64.powi(3)).sqrt());
    state
}

/// Values of one run: master, first and second moment, gradient.
struct Values {
    all: [Vec<f64>; 4],
    decay: f32,
    rounding: RoundingKey,
}

/// Types of gradient and moments.
type Types = (DType, DType);

fn values(cx: &Cx<'_>, len: usize, (grad, moment): Types, index: usize) -> Values {
    let draw = |dtype, deviation| cx.normal_as(dtype, len, deviation);
    let v: Vec<f64> = draw(DType::F32, 0.1).iter().map(|v| f64::from((v * v) as f32)).collect();
    let all = [draw(DType::F32, 1.0), draw(moment, 0.1), super::rounded(&v, moment), draw(grad, 0.5)];
    // Some begin near the place where an element's index passes 32 bits.
    let first = if index.is_multiple_of(2) { 5 + len as u64 } else { u64::from(u32::MAX) - len as u64 / 2 };
    let decay = if index.is_multiple_of(3) { 0.0 } else { 0.1 };
    Values { all, decay, rounding: RoundingKey::new(17, index as u32, first) }
}

fn place(cx: &Cx<'_>, room: &Room<'_>, values: &Values, (grad, moment): Types) -> AdamRun {
    let [master, m, v, gradient] = &values.all;
    AdamRun {
        master: room.put_as(DType::F32, master),
        m: room.put_as(moment, m),
        v: room.put_as(moment, v),
        grad: room.put_as(grad, gradient),
        weight: (cx.dtype != DType::F32).then(|| room.blank(master.len())),
        weight_decay: values.decay,
        rounding: values.rounding,
    }
}

fn run_adamw(cx: &Cx<'_>, room: &Room<'_>, lane: Lane, runs: &[AdamRun], skip: bool) {
    let scalars = room.put_as(DType::F32, &state(skip));
    let args = AdamW { runs, scalars, beta1: BETA1, beta2: BETA2, eps: EPS };
    cx.backend.adamw(lane, &args).expect("adamw");
}

/// One element, every operation rounded to fp32 by itself, in the order that [`AdamW`] documents.
fn plain(state: &[f32], decay: f32, [w, m, v, g]: [f32; 4]) -> [f32; 3] {
    let slot = |s: ScalarSlot| state[s as usize];
    let g = g * slot(ScalarSlot::GradFactor);
    let (rest1, rest2) = (1.0 - BETA1, 1.0 - BETA2);
    let (kept, new) = (BETA1 * m, rest1 * g);
    let m = kept + new;
    let (kept, square) = (BETA2 * v, g * g);
    let v = kept + rest2 * square;
    let (r1, r2) = (1.0 / slot(ScalarSlot::BiasCorrection1), 1.0 / slot(ScalarSlot::BiasCorrection2Sqrt));
    let root = v.sqrt() * r2;
    let update = (m * r1) / (root + EPS);
    let decayed = decay * w;
    [w - slot(ScalarSlot::LearningRate) * (update + decayed), m, v]
}

/// The same in fp64.
fn exact(state: &[f64], decay: f32, [w, m, v, g]: [f64; 4]) -> [f64; 3] {
    let [beta1, beta2, eps, decay] = [BETA1, BETA2, EPS, decay].map(f64::from);
    let slot = |s: ScalarSlot| state[s as usize];
    let g = g * slot(ScalarSlot::GradFactor);
    let (m, v) = (beta1 * m + (1.0 - beta1) * g, beta2 * v + (1.0 - beta2) * g * g);
    let update = m / slot(ScalarSlot::BiasCorrection1) / (v.sqrt() / slot(ScalarSlot::BiasCorrection2Sqrt) + eps);
    [w - slot(ScalarSlot::LearningRate) * (update + decay * w), m, v]
}

/// Random bits as [`RoundingKey`] documents them.
fn random(key: RoundingKey, offset: usize) -> u32 {
    let mix = |x: u64| {
        let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let step = mix(key.stream.wrapping_add(STEP.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let i = key.first + offset as u64;
    let high = ((i >> 32) as u32).wrapping_mul(0x85eb_ca6b);
    let mut x = (i as u32).wrapping_add(high).wrapping_add(step as u32);
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x ^= (step >> 32) as u32;
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// A moment as it is stored, with 16 random bits.
fn stored(value: f32, dtype: DType, random: u32) -> f32 {
    match dtype {
        DType::Bf16 => f32::from_bits((value.to_bits() + random) & 0xffff_0000),
        _ => value,
    }
}

/// Bit for bit as plain fp32 arithmetic, near fp64, on the device and on the host: many runs at once.
pub fn adamw(cx: &Cx<'_>) {
    let host = cx.backend.allocate(Place::Host, Bytes(super::ROOM)).expect("a host arena");
    let lengths = [1, 17, 257, 4097, 4096, 0, 70_001, 63, 64, 65];
    // More than one launch takes.
    let many: Vec<usize> = (0..110).map(|i| (i * i * 7) % 1500).collect();
    use DType::{Bf16, F32};
    for (types, lengths) in [
        ((F32, F32), &lengths[..]),
        ((Bf16, F32), &lengths[..5]),
        ((F32, Bf16), &lengths),
        ((Bf16, Bf16), &lengths[..5]),
        ((F32, Bf16), &many),
    ] {
        for (lane, room) in [(Lane::Compute, cx.room()), (Lane::Host, cx.room_in(host))] {
            let all: Vec<Values> = lengths.iter().enumerate().map(|(i, len)| values(cx, *len, types, i)).collect();
            let runs: Vec<AdamRun> = all.iter().map(|values| place(cx, &room, values, types)).collect();
            run_adamw(cx, &room, lane, &runs, false);
            all.iter().zip(&runs).for_each(|(values, run)| check_run(cx, &room, values, run));
        }
    }
}

fn check_run(cx: &Cx<'_>, room: &Room<'_>, values: &Values, run: &AdamRun) {
    let scalars = decoded(&encoded(&state(false), DType::F32), DType::F32);
    let narrow: Vec<f32> = scalars.iter().map(|v| *v as f32).collect();
    let after = [run.master, run.m, run.v].map(|view| room.get(view));
    let got = |j: usize, i: usize| after[j][i] as f32;
    let mut want = [const { Vec::new() }; 3];
    for i in 0..run.master.len {
        let element = [0, 1, 2, 3].map(|j| values.all[j][i]);
        let [w, m, v] = plain(&narrow, values.decay, element.map(|v| v as f32));
        let bits = random(values.rounding, i);
        let plain = [w, stored(m, run.m.dtype, bits & 0xffff), stored(v, run.v.dtype, bits >> 16)];
        for (j, name) in ["master", "m", "v"].into_iter().enumerate() {
            let got = got(j, i);
            assert_eq!(got.to_bits(), plain[j].to_bits(), "{name}[{i}] is {got}, plain fp32 gives {}", plain[j]);
        }
        exact(&scalars, values.decay, element).into_iter().zip(&mut want).for_each(|(v, w)| w.push(v));
    }
    for (view, want) in [run.master, run.m, run.v].into_iter().zip(&want) {
        // Stochastic rounding errs by up to a whole unit in the last place, not half of one.
        let factor = if view.dtype == DType::F32 { 1.0 } else { 2.0 };
        cx.close("adamw", room, view, want, factor);
    }
    holds_rounded_master(room, run);
}

/// The weight is the master rounded to its type, bit for bit.
fn holds_rounded_master(room: &Room<'_>, run: &AdamRun) {
    let Some(weight) = run.weight else { return };
    let want = encoded(&room.get(run.master), weight.dtype);
    assert!(room.get_bytes(weight) == want, "the weight is the rounded master");
}

/// A run gives the same bits whole and in pieces that begin anywhere.
pub fn adamw_cut(cx: &Cx<'_>) {
    let types = (DType::F32, DType::Bf16);
    for (len, cuts) in [(9000, vec![1, 7, 64, 1000, 4096, 8999]), (130, vec![64]), (70_001, vec![8, 16, 33_000])] {
        let values = values(cx, len, types, 1);
        let room = cx.room();
        let whole = place(cx, &room, &values, types);
        let mut pieces = Vec::new();
        let again = place(cx, &room, &values, types);
        for (from, to) in std::iter::once(0).chain(cuts.clone()).zip(cuts.into_iter().chain([len])) {
            let cut = |view: View| view.slice(from, to - from);
            pieces.push(AdamRun {
                master: cut(again.master),
                m: cut(again.m),
                v: cut(again.v),
                grad: cut(again.grad),
                weight: again.weight.map(cut),
                rounding: again.rounding.at(from),
                ..again
            });
        }
        run_adamw(cx, &room, Lane::Compute, &[whole], false);
        run_adamw(cx, &room, Lane::Compute, &pieces, false);
        for (a, b) in [(whole.master, again.master), (whole.m, again.m), (whole.v, again.v)] {
            assert!(room.get_bytes(a) == room.get_bytes(b), "{len} elements in {} pieces", pieces.len());
        }
    }
}

/// A skipped step changes no state, whatever the gradient holds, and writes the weight all the same.
pub fn adamw_skip(cx: &Cx<'_>) {
    for moment in [DType::F32, DType::Bf16] {
        for len in [1, 17, 40_000] {
            let (room, types) = (cx.room(), (DType::F32, moment));
            let mut values = values(cx, len, types, 0);
            values.all[3].fill(f64::NAN);
            let run = place(cx, &room, &values, types);
            let states: [View; 3] = [run.master, run.m, run.v];
            let before = states.map(|view| room.get_bytes(view));
            run_adamw(cx, &room, Lane::Compute, &[run], true);
            assert!(states.map(|view| room.get_bytes(view)) == before, "a skipped step changes no state");
            holds_rounded_master(&room, &run);
        }
    }
}
