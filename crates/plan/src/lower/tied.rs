//! Parameters that units of another stage also use (tied embeddings): their stage holds a replica of the weights and sums a
//! gradient of its own, which the owner adds to its own before the norm; after the optimizer the owner sends new weights.
//!
//! Both go by shards, from each replica of one stage to its fellow in the other.

use std::collections::BTreeMap;

use gpurun_types::{Lane, Place};

use crate::build::Builder;
use crate::ir::{Group, Kind, Op, Parcel, Region, ReplicaHome};
use crate::spec::{Micro, UnitId};

/// Summed gradients of replicas go to the owner.
pub(crate) fn add(b: &mut Builder<'_>, shards: &BTreeMap<UnitId, Region>) {
    for unit in b.borrowed_elsewhere() {
        let peer = b.peer(b.stage_of(unit));
        b.emit(
            Lane::Send,
            Op::Send { peer, parcel: Parcel::ReplicaGradient, unit, micro: last(b), src: shards[&unit] },
        );
    }
    for (unit, stage) in b.lent() {
        let own = shards[&unit];
        let name = format!("{}/gradient of a replica", b.spec.units[unit.0 as usize].name);
        let dtype = b.buffers[own.buffer.0 as usize].dtype;
        let received = b.transient(name, Kind::Gradients, Place::Device, own.len, dtype);
        let peer = b.peer(stage);
        b.emit(Lane::Receive, Op::Recv { peer, parcel: Parcel::ReplicaGradient, unit, micro: last(b), dst: received });
        b.emit(Lane::Compute, Op::Add { unit, src: received, dst: own });
    }
}

/// New weights go to replicas.
pub(crate) fn renew(b: &mut Builder<'_>) -> Vec<ReplicaHome> {
    for (unit, stage) in b.lent() {
        let (src, peer) = (b.own_weight(unit), b.peer(stage));
        b.emit(Lane::Send, Op::Send { peer, parcel: Parcel::ReplicaWeights, unit, micro: last(b), src });
    }
    let mut homes = Vec::new();
    for unit in b.borrowed_elsewhere() {
        let (dst, whole) = (b.own_weight(unit), b.weights[unit.0 as usize]);
        let peer = b.peer(b.stage_of(unit));
        b.emit(Lane::Receive, Op::Recv { peer, parcel: Parcel::ReplicaWeights, unit, micro: last(b), dst });
        if b.shards_optim() && !b.shards_params() {
            b.emit(Lane::Gather, Op::AllGather { unit: Some(unit), group: Group::Data, src: dst, dst: whole });
        }
        let first = if b.shards_params() { b.replica * b.layout(unit).shard } else { 0 };
        homes.push(ReplicaHome { unit, weight: (whole, first) });
    }
    homes
}

/// Messages of the end of a step carry its last micro-batch's number.
fn last(b: &Builder<'_>) -> Micro {
    Micro(b.options.micro_batches - 1)
}
