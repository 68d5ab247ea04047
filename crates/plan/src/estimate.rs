//! When each instruction would run, from a machine's rates: the step's time before there is a step.
//!
//! Every instruction takes its floating-point operations over the rate of matrix products, plus the bytes it moves over the
//! bandwidth they move at, plus a start. Lanes run side by side at full rate; waits, collectives and messages hold them up as
//! they would a run. Good for comparing plans; single kernels differ from it.

use gpurun_types::{Bytes, DType, Lane, Place};
use serde::Serialize;

use crate::build::Sketch;
use crate::ir::{Buffer, Group, InstrId, Op, Part, PassIo, Plan, RankPlan, Region};
use crate::rendezvous::{self, Cast};
use crate::spec::{ModelSpec, PlanOptions, UnitId};

/// Rates of one kind of machine, per rank. Bandwidths are bytes a second, read and written bytes both counted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Name, as `--machine` takes it.
    pub name: String,
    /// Where the rates come from.
    pub source: String,
    /// Matrix products in bf16 or fp16, FLOP/s that a training step sees.
    pub half_flops: f64,
    /// Matrix products in fp32, FLOP/s.
    pub single_flops: f64,
    /// Device memory.
    pub memory: f64,
    /// Host memory, for the optimizer on the host.
    pub host_memory: f64,
    /// From host to device.
    pub to_device: f64,
    /// From device to host.
    pub to_host: f64,
    /// Between ranks: what one sends in a collective or a message, a second.
    pub peer_link: f64,
    /// Seconds to start an instruction.
    pub start: f64,
    /// Seconds to start a collective or message, for each other member.
    pub hop: f64,
}

impl Machine {
    /// Names that [`Machine::named`] knows.
    pub const NAMES: [&'static str; 4] = ["cpu", "h200", "a100", "l40s"];

    /// A machine by name; `cores` and `ranks` share out one processor where the name is `cpu`.
    #[must_use]
    pub fn named(name: &str, cores: usize, ranks: u32) -> Option<Self> {
        Some(match name {
            "cpu" => Self::cpu(cores as f64 / f64::from(ranks.max(1))),
            "h200" => Self {
                source: "one H200 measured; NVLink from its data sheet".into(),
                ..gpu(name, [600e12, 45e12], 4.28e12, 50e9, 350e9)
            },
            "a100" => Self {
                source: "data sheet of the A100 SXM, at the efficiency measured on an H200".into(),
                ..gpu(name, [200e12, 17e12], 1.8e12, 24e9, 230e9)
            },
            "l40s" => Self {
                source: "data sheet of the L40S on PCIe 4.0, at the efficiency measured on an H200".into(),
                ..gpu(name, [220e12, 60e12], 0.77e12, 24e9, 20e9)
            },
            _ => return None,
        })
    }

    /// `cores` cores of a server processor.
    fn cpu(cores: f64) -> Self {
        Self {
            name: "cpu".into(),
            source: format!("cores a rank of a Sapphire Rapids server: {cores}, measured with two"),
            half_flops: 90e9 * cores,
            single_flops: 90e9 * cores,
            memory: 10e9 * cores,
            host_memory: 10e9 * cores,
            to_device: 5e9 * cores,
            to_host: 5e9 * cores,
            peer_link: 3e9,
            start: 5e-6,
            hop: 2e-6,
        }
    }

    /// What it is, in a line.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "{}: {} TFLOP/s in half precision, {} in fp32; GB/s: memory {:.0}, host memory {:.0}, to the host {:.0}, to peers {:.0} ({})",
            self.name,
            (self.half_flops / 1e10).round() / 100.0,
            (self.single_flops / 1e10).round() / 100.0,
            self.memory / 1e9,
            self.host_memory / 1e9,
            self.to_host / 1e9,
            self.peer_link / 1e9,
            self.source
        )
    }
}

fn gpu(name: &str, [half_flops, single_flops]: [f64; 2], memory: f64, host_link: f64, peer_link: f64) -> Machine {
    Machine {
        name: name.to_owned(),
        source: String::new(),
        half_flops,
        single_flops,
        memory,
        host_memory: 96e9,
        to_device: host_link,
        to_host: host_link,
        peer_link,
        start: 10e-6,
        hop: 8e-6,
    }
}

/// When an instruction runs, in seconds from the start of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Span {
    /// It begins.
    pub start: f64,
    /// It is done.
    pub end: f64,
}

/// When every instruction of a training step runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// Whose rates.
    pub machine: Machine,
    /// By rank and instruction.
    pub ranks: Vec<Vec<Span>>,
    /// The whole step.
    pub seconds: f64,
}

impl Timeline {
    /// Seconds in which a lane of a rank works.
    #[must_use]
    pub fn busy(&self, plan: &Plan, rank: usize, lane: Lane) -> f64 {
        let instrs = plan.ranks[rank].train.instrs.iter().zip(&self.ranks[rank]);
        instrs.filter(|(i, _)| i.lane == lane).map(|(_, span)| span.end - span.start).sum()
    }
}

/// The training step of a verified plan on a machine.
///
/// # Panics
/// When the plan would not run to its end: it was not verified.
#[must_use]
pub fn estimate(plan: &Plan, spec: &ModelSpec, machine: &Machine) -> Timeline {
    estimate_with(plan, spec, machine, |_, _| None)
}

/// As [`estimate`], with the seconds of an instruction (by rank and index) where `known` has them.
///
/// # Panics
/// As [`estimate`].
#[must_use]
pub fn estimate_with(
    plan: &Plan,
    spec: &ModelSpec,
    machine: &Machine,
    known: impl Fn(usize, usize) -> Option<f64>,
) -> Timeline {
    let ranks: Vec<&RankPlan> = plan.ranks.iter().collect();
    let seconds = |index: usize, instr: usize| {
        let rank = ranks[index];
        let cost = Cost { rank, spec, machine, options: &plan.options };
        known(index, instr).unwrap_or_else(|| cost.seconds(&rank.train.instrs[instr].op))
    };
    let ranks = spans(Cast::All(plan.options.mesh), &ranks, seconds);
    Timeline { machine: machine.clone(), seconds: end(&ranks), ranks }
}

/// Seconds of the training step of a sketch on a machine.
///
/// # Panics
/// When the sketch would not run to its end: a bug of the passes.
#[must_use]
pub fn estimate_sketch(sketch: &Sketch, spec: &ModelSpec, machine: &Machine) -> f64 {
    let stages: Vec<&RankPlan> = sketch.stages.iter().collect();
    let seconds = |stage: usize, instr: usize| {
        let rank = stages[stage];
        Cost { rank, spec, machine, options: &sketch.options }.seconds(&rank.train.instrs[instr].op)
    };
    end(&spans(Cast::FirstReplicas(sketch.options.mesh), &stages, seconds))
}

fn end(ranks: &[Vec<Span>]) -> f64 {
    ranks.iter().flatten().map(|span| span.end).fold(0.0, f64::max)
}

/// When each instruction runs, given how long each takes by rank and index.
fn spans(cast: Cast, ranks: &[&RankPlan], seconds: impl Fn(usize, usize) -> f64) -> Vec<Vec<Span>> {
    let programs: Vec<_> = ranks.iter().map(|r| &r.train).collect();
    let mut spans: Vec<Vec<Span>> = programs.iter().map(|p| vec![Span::default(); p.instrs.len()]).collect();
    let mut lanes = vec![[0.0f64; Lane::ALL.len()]; programs.len()];
    let outcome = rendezvous::run(cast, &programs, |together| {
        let mut start = 0.0f64;
        let mut longest = 0.0f64;
        for &(rank, InstrId(id)) in together {
            let instr = &programs[rank].instrs[id as usize];
            let waits = instr.waits.iter().map(|w| spans[rank][w.0 as usize].end);
            start = waits.fold(start.max(lanes[rank][instr.lane.index()]), f64::max);
            longest = longest.max(seconds(rank, id as usize));
        }
        for &(rank, InstrId(id)) in together {
            spans[rank][id as usize] = Span { start, end: start + longest };
            lanes[rank][programs[rank].instrs[id as usize].lane.index()] = start + longest;
        }
    });
    outcome.expect("a verified plan runs to its end");
    spans
}

/// Times that bytes of edges and saved tensors cross device memory in a pass: made, read by what follows, and norms and
/// activation functions on the way. Fitted to measured steps of GPT-2 and Llama.
pub(crate) const CROSSINGS: f64 = 3.0;

struct Cost<'a> {
    rank: &'a RankPlan,
    spec: &'a ModelSpec,
    machine: &'a Machine,
    options: &'a PlanOptions,
}

impl Cost<'_> {
    fn seconds(&self, op: &Op) -> f64 {
        let m = self.machine;
        match op {
            Op::ReduceScatter { group, src, dst, .. } => self.collective(*group, self.bytes(src) - self.bytes(dst)),
            Op::AllGather { group, src, dst, .. } => self.collective(*group, self.bytes(dst) - self.bytes(src)),
            Op::Send { src: region, .. } | Op::Recv { dst: region, .. } => m.hop + self.bytes(region) / m.peer_link,
            _ => m.start + self.on_lane(op),
        }
    }

    fn on_lane(&self, op: &Op) -> f64 {
        let m = self.machine;
        let unit = |unit: &UnitId| &self.spec.units[unit.0 as usize];
        match op {
            Op::LoadBatch { batch, .. } => batch.iter().map(|r| self.bytes(r)).sum::<f64>() / m.to_device,
            Op::Forward { unit: of, io, .. } => self.pass(unit(of).forward_flops, io, 1.0),
            Op::Restore { unit: of, io, filled, .. } => {
                let filled = filled.iter().map(|at| self.bytes(&io.saved[*at])).sum::<f64>();
                unit(of).restore_flops / self.flops() + CROSSINGS * filled / m.memory
            }
            // Two products for each of the forward's; the loss unit's forward is in its backward.
            Op::Backward { unit: of, io, .. } if io.dy.is_none() => self.pass(3.0 * unit(of).forward_flops, io, 3.0),
            Op::Backward { unit: of, io, part, .. } => {
                let (whole, weights) = (2.0 * unit(of).forward_flops, unit(of).weights_flops);
                match part {
                    Part::Whole => self.pass(whole, io, 2.0),
                    Part::Input => self.pass(whole - weights, io, 1.0),
                    Part::Weights => self.pass(weights, io, 1.0),
                }
            }
            Op::Adam { place: Place::Host, .. } => self.traffic(op) / m.host_memory,
            Op::Copy { src, dst, .. } if self.buffer(src).place != self.buffer(dst).place => {
                let down = self.buffer(dst).place == Place::Host;
                self.bytes(src) / if down { m.to_host } else { m.to_device }
            }
            Op::Zero { .. } | Op::Add { .. } | Op::Norm { .. } | Op::Adam { .. } | Op::Copy { .. } => {
                self.traffic(op) / m.memory
            }
            Op::Scalars { .. } => 0.0,
            Op::ReduceScatter { .. } | Op::AllGather { .. } | Op::Send { .. } | Op::Recv { .. } => {
                unreachable!("between ranks")
            }
        }
    }

    /// Bytes read and written.
    fn traffic(&self, op: &Op) -> f64 {
        let accesses = op.accesses();
        accesses.reads.iter().chain(&accesses.writes).map(|r| self.bytes(r)).sum()
    }

    fn flops(&self) -> f64 {
        if self.options.dtype == DType::F32 { self.machine.single_flops } else { self.machine.half_flops }
    }

    fn pass(&self, flops: f64, io: &PassIo, times: f64) -> f64 {
        let regions = io.saved.iter().chain(&io.deferred).chain(&io.x).chain(&io.y).chain(&io.dx);
        let bytes: f64 = regions.map(|r| self.bytes(r)).sum();
        flops / self.flops() + times * CROSSINGS * bytes / self.machine.memory
    }

    /// A ring: each rank sends all but its own shard.
    fn collective(&self, group: Group, sent: f64) -> f64 {
        let mesh = self.options.mesh;
        let members = match group {
            Group::Data => mesh.dp,
            Group::World => mesh.dp * mesh.pp,
        };
        f64::from(members - 1) * self.machine.hop + sent / self.machine.peer_link
    }

    fn buffer(&self, region: &Region) -> &Buffer {
        &self.rank.buffers[region.buffer.0 as usize]
    }

    fn bytes(&self, region: &Region) -> f64 {
        let Bytes(bytes) = self.buffer(region).dtype.bytes(region.len);
        bytes as f64
    }
}
