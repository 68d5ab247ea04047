//! Less than any plan could need, from sizes alone: so that a search builds only what could be among the best.

use gpurun_types::{Bytes, DType};

use crate::build;
use crate::error::PlanError;
use crate::estimate::{CROSSINGS, Machine};
use crate::spec::{ModelSpec, OffloadVia, PlanOptions, Recompute, UnitId, UnitSpec};
use crate::stages::{Chunk, Placement};

/// What a plan takes at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bound {
    /// Seconds of a step, by [`crate::estimate_sketch`].
    pub seconds: f64,
    /// The same with an optimizer that takes no time.
    pub without_optimizer: f64,
    /// Device memory of the rank that needs most.
    pub device_bytes: Bytes,
}

impl Bound {
    /// Of the plan of `spec` under `options` on `machine`.
    ///
    /// # Errors
    /// As [`crate::Plan::build`], but for verification.
    pub fn new(spec: &ModelSpec, options: &PlanOptions, machine: &Machine) -> Result<Self, PlanError> {
        let placement = build::placement(spec, options)?;
        let (mut compute, mut optimizer, mut links, mut device_bytes) = (0.0f64, 0.0f64, 0.0f64, 0);
        for stage in 0..placement.stages {
            let of = Stage { spec, options, machine, placement: &placement, stage };
            compute = compute.max(of.compute());
            // No rank begins with its optimizer before the norms of all are known.
            optimizer = optimizer.max(of.optimizer());
            links = links.max(of.links());
            device_bytes = device_bytes.max(of.device_bytes());
        }
        let without_optimizer = compute.max(links);
        let seconds = (compute + optimizer).max(links);
        Ok(Self { seconds, without_optimizer, device_bytes: Bytes(device_bytes) })
    }
}

/// One stage of what is to be planned.
struct Stage<'a> {
    spec: &'a ModelSpec,
    options: &'a PlanOptions,
    machine: &'a Machine,
    placement: &'a Placement,
    stage: u32,
}

impl Stage<'_> {
    fn units(&self) -> impl Iterator<Item = (UnitId, &UnitSpec)> {
        self.placement.units_of(self.stage).into_iter().map(|u| (u, &self.spec.units[u.0 as usize]))
    }

    fn micros(&self) -> f64 {
        f64::from(self.options.micro_batches)
    }

    /// All passes of the stage, after those of one micro-batch through the chunks before its first; and before what follows its
    /// last, where that is a backward through the same chunk.
    fn compute(&self) -> f64 {
        let last = self.spec.units.len() as u32 - 1;
        let own: f64 = self.units().map(|(id, _)| self.passes(id.0, last).iter().sum::<f64>()).sum();
        let before = self.placement.chunks.iter().take(self.stage as usize).flat_map(|chunk| chunk.units.clone());
        let edge = before.map(|unit| {
            let [forward, backward] = self.passes(unit, last);
            if self.options.schedule.splits() { forward } else { forward + backward }
        });
        self.micros() * own + edge.sum::<f64>()
    }

    /// Seconds of the forward and of the backward of one micro-batch, with what is computed again.
    fn passes(&self, index: u32, last: u32) -> [f64; 2] {
        let unit = &self.spec.units[index as usize];
        let rate = if self.options.dtype == DType::F32 { self.machine.single_flops } else { self.machine.half_flops };
        let size = self.options.dtype.size() as f64;
        let saved: f64 = unit.saved.iter().map(|t| t.dtype.bytes(t.elements).0 as f64).sum();
        let (input, output) = (size * unit.input as f64, size * unit.output as f64);
        let moved = |bytes: f64| CROSSINGS * bytes / self.machine.memory;
        let forward = unit.forward_flops / rate + moved(saved + input + output);
        if index == last {
            return [0.0, 3.0 * unit.forward_flops / rate + 3.0 * moved(2.0 * input)];
        }
        let backward = 2.0 * (unit.forward_flops / rate + moved(saved + 2.0 * input));
        let again = match self.options.recompute {
            Recompute::Selective => unit.restore_flops / rate,
            Recompute::Full if index > 0 => forward,
            Recompute::None | Recompute::Full => 0.0,
        };
        [forward, backward + again]
    }

    /// Elements of the optimizer state of each unit, and whether it is on the host.
    fn state(&self) -> impl Iterator<Item = (f64, bool)> {
        let count = self.units().count();
        let device = count - self.options.units_on_host(count);
        let (dp, sharded) = (self.options.mesh.dp, build::sharded(self.options)[2]);
        self.units().enumerate().map(move |(index, (_, unit))| {
            let layout = unit.layout(dp);
            (if sharded { layout.shard } else { layout.padded } as f64, index >= device)
        })
    }

    /// Bytes of master weights (where they are apart) and moments for each element.
    fn state_bytes(&self) -> f64 {
        let master = if self.options.dtype == DType::F32 { 0 } else { 4 };
        (master + 2 * self.options.adam_dtype.size()) as f64
    }

    fn optimizer(&self) -> f64 {
        // The gradient is read, master weights and moments are read and written.
        let traffic = 4.0 + 2.0 * (4.0 + 2.0 * self.options.adam_dtype.size() as f64);
        let (mut device, mut host, mut stored) = (0.0, 0.0, 0.0);
        for (elements, on_host) in self.state() {
            if on_host && self.options.offload_via == OffloadVia::Host {
                host += elements * traffic / self.machine.host_memory;
                continue;
            }
            device += elements * traffic / self.machine.memory;
            if on_host {
                stored += elements * self.state_bytes() / self.machine.to_host;
            }
        }
        f64::max(device, f64::max(host, stored))
    }

    /// Collectives of gradients, and of weights that are gathered for use.
    fn links(&self) -> f64 {
        let dp = self.options.mesh.dp;
        if dp == 1 {
            return 0.0;
        }
        let others = |unit: &UnitSpec| {
            let layout = unit.layout(dp);
            (layout.padded - layout.shard) as f64
        };
        let [params, grads, _] = build::sharded(self.options);
        let reductions = if grads { self.micros() } else { 1.0 };
        let reduced = 4.0 * reductions * self.units().map(|(_, unit)| others(unit)).sum::<f64>();
        let gathered = |chunk: &Chunk| {
            // A forward and a backward; at the ends of a chunk one gather may serve a pass of each.
            let inner = (chunk.units.start + 1)..(chunk.units.end - 1).max(chunk.units.start + 1);
            2.0 * self.micros() * inner.map(|u| others(&self.spec.units[u as usize])).sum::<f64>()
        };
        let gathers = self.placement.of_stage(self.stage).map(gathered).sum::<f64>();
        let gathers = if params { gathers * self.options.dtype.size() as f64 } else { 0.0 };
        reduced.max(gathers) / self.machine.peer_link
    }

    /// All gradients beside all state; or the activations that are alive together beside the state.
    fn device_bytes(&self) -> u64 {
        let (dp, [params, grads, _]) = (self.options.mesh.dp, build::sharded(self.options));
        let cut = |sharded: bool, size: usize| -> u64 {
            let elements = |unit: &UnitSpec| {
                let layout = unit.layout(dp);
                if sharded { layout.shard } else { layout.padded }
            };
            self.units().map(|(_, unit)| (elements(unit) * size) as u64).sum()
        };
        let state: f64 = self.state().filter(|(_, on_host)| !on_host).map(|(elements, _)| elements).sum();
        let persistent = cut(params, self.options.dtype.size()) + (state * self.state_bytes()) as u64;
        let (mesh, schedule) = (self.options.mesh, self.options.schedule);
        let held = u64::from(schedule.in_flight(self.stage, mesh.pp, self.options.micro_batches));
        let least = self.placement.of_stage(self.stage).map(|chunk| self.activations(chunk)).min();
        persistent + cut(grads, 4).max(held * least.unwrap_or_default())
    }

    /// What a pass through a chunk leaves for its backward.
    fn activations(&self, chunk: &Chunk) -> u64 {
        let last = self.spec.units.len() as u32 - 1;
        // Where gradients of weights are not apart, an order that would keep more keeps less (an end has whole backwards).
        if self.options.schedule.splits() || chunk.units.clone().all(|u| u == last) {
            return 0;
        }
        let kept = |index: u32| {
            let unit = &self.spec.units[index as usize];
            let freed = |at: usize| match self.options.recompute {
                Recompute::None => false,
                Recompute::Selective => unit.restorable.contains(&at),
                Recompute::Full => index > 0 && index < last,
            };
            let saved = unit.saved.iter().enumerate().filter(|(at, _)| !freed(*at));
            let edge = if index + 1 < chunk.units.end { unit.output * self.options.dtype.size() } else { 0 };
            saved.map(|(_, t)| t.dtype.bytes(t.elements).0).sum::<u64>() + edge as u64
        };
        chunk.units.clone().map(kept).sum()
    }
}
