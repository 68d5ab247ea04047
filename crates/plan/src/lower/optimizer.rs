//! Adam on every unit: on the device, on the host, or on the device with its state streamed through; then new weights for all.

use gpurun_types::{DType, Lane, Place};

use super::gradients::Gradients;
use crate::build::Builder;
use crate::ir::{AdamPart, Group, Kind, Op, Region, UnitHome};
use crate::spec::{OffloadVia, UnitId};

/// Master weights and moments of one unit, and how its weights get their new values.
#[derive(Clone, Copy)]
struct State {
    unit: UnitId,
    /// First element of the unit's flat buffer that all regions cover.
    first: usize,
    master: Region,
    m: Region,
    v: Region,
    /// Device weights of the same elements.
    weight: Region,
    /// Host copy of the weights in compute precision, when Adam runs on the host and they are not the master.
    host_weight: Option<Region>,
    place: Place,
}

/// Emits the optimizer; returns where state lives.
pub(crate) fn lower(b: &mut Builder<'_>, gradients: &Gradients) -> Vec<UnitHome> {
    let states: Vec<State> = b.units.clone().into_iter().map(|u| state(b, u)).collect();
    let host_scalars = host_scalars(b, &states);
    // Nothing of the group waits for one unit alone: then all that is on the device is one instruction.
    let together = b.dp == 1 || b.shards_params();
    let mut parts: Vec<AdamPart> = Vec::new();
    let mut streamed: Vec<Streamed> = Vec::new();
    for (index, state) in states.iter().enumerate() {
        let grad = gradients.for_adam(b, state.unit);
        match (state.place, b.options.offload_via) {
            (Place::Device, _) => {
                parts.push(part(b, state, grad));
                let more = states.get(index + 1).is_some_and(|n| n.place == Place::Device);
                if !together || !more {
                    let (parts, scalars) = (std::mem::take(&mut parts), b.scalars);
                    b.emit(Lane::Compute, Op::Adam { parts, scalars, place: Place::Device });
                }
            }
            (Place::Host, OffloadVia::Host) => {
                let scalars = host_scalars.expect("made when any state is on the host");
                on_host(b, state, grad, scalars);
            }
            (Place::Host, OffloadVia::Stream) => {
                if streamed.is_empty() {
                    streamed.push(fetch(b, state));
                }
                // The next unit's state comes in while this one is stepped: two slots.
                let next = states.get(index + 1).filter(|n| n.place == Place::Host);
                let ahead = next.map(|n| fetch(b, n));
                let slot = streamed.pop().expect("fetched just now or one unit ago");
                step_streamed(b, state, slot, grad);
                streamed.extend(ahead);
            }
        }
    }
    if b.shards_optim() && !b.shards_params() {
        for state in &states {
            let dst = b.weights[state.unit.0 as usize];
            let op = Op::AllGather { unit: Some(state.unit), group: Group::Data, src: state.weight, dst };
            b.emit(Lane::Gather, op);
        }
    }
    states.iter().map(|s| b.home(s.unit, b.weights[s.unit.0 as usize], s.master, s.m, s.v)).collect()
}

/// Units whose state is on the host: the last ones of the stage. Their new weights are needed last in the next forward.
fn on_host_side(b: &Builder<'_>, unit: UnitId) -> bool {
    b.units[b.units.len() - b.options.units_on_host(b.units.len())..].contains(&unit)
}

fn state(b: &mut Builder<'_>, unit: UnitId) -> State {
    let place = if on_host_side(b, unit) { Place::Host } else { Place::Device };
    let (layout, weight) = (b.layout(unit), b.own_weight(unit));
    let first = if b.shards_optim() { b.replica * layout.shard } else { 0 };
    let name = b.spec.units[unit.0 as usize].name.clone();
    let via_host = place == Place::Host && b.options.offload_via == OffloadVia::Host;
    let own_master = b.options.dtype != DType::F32 || via_host;
    let moment = b.options.adam_dtype;
    let mut make = |what: &str, kind, dtype| b.persistent(format!("{name}/{what}"), kind, place, weight.len, dtype);
    let master = if own_master { make("master", Kind::Master, DType::F32) } else { weight };
    let m = make("m", Kind::MomentM, moment);
    let v = make("v", Kind::MomentV, moment);
    // Kept between steps: a skipped step sends it up unchanged.
    let host_weight = (via_host && b.options.dtype != DType::F32)
        .then(|| b.persistent(format!("{name}/new weights"), Kind::Weights, place, weight.len, b.options.dtype));
    State { unit, first, master, m, v, weight, host_weight, place }
}

/// The scalars where a host-side Adam reads them.
fn host_scalars(b: &mut Builder<'_>, states: &[State]) -> Option<Region> {
    let first = states.iter().find(|s| s.place == Place::Host)?;
    if b.options.offload_via == OffloadVia::Stream {
        return None;
    }
    let dst = b.transient("host scalars".into(), Kind::Scalars, Place::Host, b.scalars.len, DType::F32);
    b.emit(Lane::CopyOut, Op::Copy { unit: first.unit, src: b.scalars, dst });
    Some(dst)
}

fn separate(b: &Builder<'_>, state: &State) -> Option<Region> {
    (b.options.dtype != DType::F32).then_some(state.weight)
}

/// A unit's state where it lives, with the weights that the device computes with.
fn part(b: &Builder<'_>, s: &State, grad: Region) -> AdamPart {
    let (unit, first, master, m, v) = (s.unit, s.first, s.master, s.m, s.v);
    AdamPart { unit, first, grad, master, m, v, weight: separate(b, s) }
}

/// Gradient down, step, weights up.
fn on_host(b: &mut Builder<'_>, s: &State, grad: Region, scalars: Region) {
    let name = format!("{}/gradient on the host", b.spec.units[s.unit.0 as usize].name);
    let down = b.transient(name, Kind::Gradients, Place::Host, grad.len, DType::F32);
    b.emit(Lane::CopyOut, Op::Copy { unit: s.unit, src: grad, dst: down });
    let part = AdamPart { weight: s.host_weight, ..part(b, s, down) };
    b.emit(Lane::Host, Op::Adam { parts: vec![part], scalars, place: Place::Host });
    let src = s.host_weight.unwrap_or(s.master);
    b.emit(Lane::CopyIn, Op::Copy { unit: s.unit, src, dst: s.weight });
}

/// State of one unit in a device slot.
struct Streamed {
    master: Region,
    m: Region,
    v: Region,
}

fn fetch(b: &mut Builder<'_>, s: &State) -> Streamed {
    let mut bring = |src: Region, what: &str| {
        let name = format!("{}/{what} on its way", b.spec.units[s.unit.0 as usize].name);
        let dtype = b.buffers[src.buffer.0 as usize].dtype;
        let dst = b.transient(name, Kind::Communication, Place::Device, src.len, dtype);
        b.emit(Lane::CopyIn, Op::Copy { unit: s.unit, src, dst });
        dst
    };
    // fp32 weights are their own master, and stay.
    let master = if s.master == s.weight { s.weight } else { bring(s.master, "master") };
    Streamed { master, m: bring(s.m, "m"), v: bring(s.v, "v") }
}

fn step_streamed(b: &mut Builder<'_>, s: &State, slot: Streamed, grad: Region) {
    let Streamed { master, m, v } = slot;
    let (scalars, unit) = (b.scalars, s.unit);
    let part = AdamPart { master, m, v, ..part(b, s, grad) };
    b.emit(Lane::Compute, Op::Adam { parts: vec![part], scalars, place: Place::Device });
    for (src, dst) in [(master, s.master), (m, s.m), (v, s.v)] {
        if src != dst {
            b.emit(Lane::CopyOut, Op::Copy { unit, src, dst });
        }
    }
}
