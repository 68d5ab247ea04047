//! Trains small models on several ranks in one process and gathers what came out.
#![allow(dead_code)] // each test file uses its own part

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use gpurun_checkpoint::Checkpoint;
use gpurun_comm::wrap::Recording;
use gpurun_comm::{CommError, Communicator, Fabric, FabricOptions};
use gpurun_device::{Backend, CpuBackend, LossScaling};
use gpurun_engine::checkpoint::{self, Position, Provenance};
use gpurun_engine::{
    AdamOptions, Control, HostBatch, HostNetwork, Network, Session, SessionOptions, State, StepInputs, StepOutcome,
    Watcher,
};
use gpurun_model::{BatchShape, Model, ModelConfig};
use gpurun_plan::{Mesh, OffloadVia, PlanOptions, Policy, Recompute, Schedule};
use gpurun_types::{Bytes, DType, Lane, Place, Rank};

/// Nobody watches.
pub struct Quiet;

impl Watcher for Quiet {
    fn at(&self, _: u32) {}
    fn waiting_for(&self, _: u32) {}
    fn progressed(&self) {}
}

/// One way to train.
#[derive(Clone, Debug)]
pub struct Case {
    pub model: ModelConfig,
    /// Replicas of each stage.
    pub ranks: u32,
    pub stage: u8,
    pub offload: Option<OffloadVia>,
    pub fraction: f64,
    pub micro_batches: u32,
    pub dtype: DType,
    /// Type of Adam's moments.
    pub moments: DType,
    pub recompute: Recompute,
    pub pp: u32,
    pub schedule: Schedule,
    /// Units of each chunk.
    pub split: Option<Vec<u32>>,
    pub steps: u64,
    /// Sequences per step, over all ranks and micro-batches.
    pub global_batch: usize,
    pub loss_scale: Option<f32>,
    pub clip: f32,
    /// Checkpoint that it starts from.
    pub resume: Option<PathBuf>,
    /// Folder that it saves to at its end.
    pub save: Option<PathBuf>,
    /// Most device memory of a rank.
    pub limit: Option<Bytes>,
}

/// What came out of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f32>,
    pub skipped: Vec<bool>,
    pub loss_scales: Vec<f32>,
    /// Every parameter's master weights, first and second moments.
    pub state: BTreeMap<(String, u8), Vec<f32>>,
}

pub const SEQ: usize = 12;

/// Pseudo-random tokens of global sequence `index`: the same whatever the layout.
fn sequence(index: u64, vocabulary: usize) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let mut x = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut draw = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x % vocabulary as u64) as i32
    };
    let text: Vec<i32> = (0..=SEQ).map(|_| draw()).collect();
    let cut = 1 + (index as usize * 5) % (SEQ - 1);
    let starts = (0..SEQ).map(|i| if i < cut { 0 } else { cut as i32 }).collect();
    (text[..SEQ].to_vec(), text[1..].to_vec(), starts)
}

fn inputs(case: &Case, rank: u32, step: u64) -> StepInputs {
    let batch = case.global_batch / (case.ranks * case.micro_batches) as usize;
    let micros = (0..case.micro_batches)
        .map(|micro| {
            let mut host = HostBatch::default();
            for i in 0..batch {
                let index = (micro * case.ranks + rank) as usize * batch + i;
                let (t, y, s) = sequence(step * case.global_batch as u64 + index as u64, case.model.vocabulary);
                host.tokens.extend(t);
                host.targets.extend(y);
                host.starts.extend(s);
            }
            host
        })
        .collect();
    StepInputs { micros, learning_rate: 3e-3, loss_factor: 1.0 / (case.global_batch * SEQ) as f32 }
}

impl Case {
    /// fp32, one rank, stage 0, nothing special.
    pub fn plain(model: ModelConfig) -> Self {
        Self {
            model,
            ranks: 1,
            stage: 0,
            offload: None,
            fraction: 1.0,
            micro_batches: 1,
            dtype: DType::F32,
            moments: DType::F32,
            recompute: Recompute::None,
            pp: 1,
            schedule: Schedule::OneFOneB,
            split: None,
            steps: 3,
            global_batch: 12,
            loss_scale: None,
            clip: 0.5,
            resume: None,
            save: None,
            limit: None,
        }
    }

    /// What a session of it is built from.
    pub fn options(&self) -> SessionOptions {
        let place = if self.offload.is_some() { Place::Host } else { Place::Device };
        SessionOptions {
            plan: PlanOptions {
                mesh: Mesh { dp: self.ranks, pp: self.pp },
                micro_batches: self.micro_batches,
                policy: Policy::for_stage(self.stage, place).expect("a stage from 0 to 3"),
                dtype: self.dtype,
                adam_dtype: self.moments,
                offload_via: self.offload.unwrap_or(OffloadVia::Host),
                offload_fraction: self.fraction,
                recompute: self.recompute,
                schedule: self.schedule,
                split: self.split.clone(),
            },
            shape: BatchShape { batch: self.global_batch / (self.ranks * self.micro_batches) as usize, seq: SEQ },
            adam: AdamOptions {
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                clip: self.clip,
                seed: 17,
                scaling: self.loss_scale.map(|_| LossScaling {
                    growth: 2.0,
                    backoff: 0.5,
                    interval: 2,
                    max: 65536.0,
                    min: 1.0,
                }),
            },
            loss_scale: self.loss_scale.unwrap_or(1.0),
            device_limit: self.limit,
        }
    }

    /// Trains on threads and gathers the state of all ranks.
    pub fn run(&self) -> Outcome {
        self.run_over(|_, network| Box::new(network))
    }

    /// As [`Case::run`], each rank over what `wrap` makes of its network.
    pub fn run_over(&self, wrap: impl Fn(Rank, HostNetwork) -> Box<dyn Network> + Sync) -> Outcome {
        let wrap = &wrap;
        let world = self.ranks * self.pp;
        let fabrics: Vec<Option<Arc<Fabric>>> = if world == 1 {
            vec![None]
        } else {
            Fabric::threads(world, FabricOptions::default()).into_iter().map(Some).collect()
        };
        let parts: Vec<Outcome> = std::thread::scope(|scope| {
            let handles: Vec<_> = fabrics
                .into_iter()
                .enumerate()
                .map(|(rank, fabric)| scope.spawn(move || self.run_rank(rank as u32, fabric, wrap)))
                .collect();
            handles.into_iter().map(|h| h.join().expect("a rank does not panic")).collect()
        });
        let mut whole = parts[0].clone();
        for part in &parts[1..] {
            assert_eq!(part.losses, whole.losses, "every rank reports the same loss");
            assert_eq!(bits(&part.norms), bits(&whole.norms), "every rank sees the same norm");
            for (key, values) in &part.state {
                let to = whole.state.entry(key.clone()).or_insert_with(|| vec![f32::NAN; values.len()]);
                for (a, b) in to.iter_mut().zip(values).filter(|(_, b)| !b.is_nan()) {
                    assert!(a.is_nan(), "{key:?} is owned once");
                    *a = *b;
                }
            }
        }
        for (key, values) in &whole.state {
            assert!(values.iter().all(|v| v.is_finite()), "{key:?} is whole and finite");
        }
        whole
    }

    /// Votes of all ranks, for saving.
    fn control(&self, fabric: Option<&Arc<Fabric>>) -> Control {
        let Some(fabric) = fabric else { return Control::solo() };
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(1).expect("a CPU backend"));
        let all: Vec<Rank> = (0..self.ranks * self.pp).map(Rank).collect();
        let link = fabric.communicator(63, &all, backend.clone()).expect("a communicator of all ranks");
        Control::new(Arc::new(link), backend).expect("memory for a vote")
    }

    fn run_rank(
        &self,
        rank: u32,
        fabric: Option<Arc<Fabric>>,
        wrap: &(impl Fn(Rank, HostNetwork) -> Box<dyn Network> + Sync),
    ) -> Outcome {
        let cpu = Arc::new(CpuBackend::new(1).expect("a CPU backend"));
        let backend: Arc<dyn Backend> = cpu.clone();
        let control = self.control(fabric.as_ref());
        let model: Arc<Model> = Arc::new(self.model.build().expect("a valid model"));
        let network = wrap(Rank(rank), HostNetwork { fabric, backend: backend.clone() });
        let session =
            Session::new(backend, model, network.as_ref(), Rank(rank), self.options()).expect("a session can be made");
        let start = match &self.resume {
            None => {
                session.initialise(17).expect("weights can be set");
                0
            }
            Some(dir) => {
                let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
                checkpoint::load(&session, &checkpoint).expect("a checkpoint of this model").step
            }
        };
        let mut out =
            Outcome { losses: vec![], norms: vec![], skipped: vec![], loss_scales: vec![], state: BTreeMap::new() };
        for step in start..start + self.steps {
            let done: StepOutcome =
                session.step(step + 1, inputs(self, rank % self.ranks, step), &Quiet).expect("a step can be run");
            out.losses.push(done.loss_sum / (self.global_batch * SEQ) as f64);
            out.norms.push(done.grad_norm);
            out.skipped.push(done.skipped);
            out.loss_scales.push(done.loss_scale);
            // Whatever is trained in these tests must need nothing more from here on.
            cpu.seal();
        }
        if self.steps > 0 {
            assert_used_as_planned(&cpu, &session, self);
        }
        if let Some(dir) = &self.save {
            let position = Position { step: start + self.steps, tokens: 0 };
            checkpoint::save(&session, &control, dir, position, &Provenance::default(), None).expect("it is saved");
        }
        let sizes: BTreeMap<String, usize> =
            session.model().units.iter().flat_map(|u| u.params()).map(|p| (p.name.clone(), p.elements())).collect();
        for stretch in session.owned_stretches() {
            let state = match stretch.state {
                State::Master => 0,
                State::M => 1,
                State::V => 2,
            };
            let to =
                out.state.entry((stretch.name.clone(), state)).or_insert_with(|| vec![f32::NAN; sizes[&stretch.name]]);
            let to = &mut to[stretch.start..stretch.start + stretch.region.len];
            session.read_f32(stretch.region, to).expect("state can be read");
        }
        out
    }
}

/// A rank, and the lane and members of one of its communicators.
pub type Key = (Rank, Lane, Vec<Rank>);

/// Who made which calls.
pub type Log = Arc<Mutex<BTreeMap<Key, Arc<Recording>>>>;

/// A network whose communicators note their calls.
pub struct Noting {
    pub rank: Rank,
    pub inner: HostNetwork,
    pub log: Log,
}

impl Network for Noting {
    fn communicator(&self, channel: u32, members: &[Rank], lane: Lane) -> Result<Arc<dyn Communicator>, CommError> {
        let recording = Arc::new(Recording::new(self.inner.communicator(channel, members, lane)?));
        let key = (self.rank, lane, members.to_vec());
        let before = self.log.lock().expect("nobody panicked").insert(key, recording.clone());
        assert!(before.is_none(), "one communicator for {members:?} on lane {lane}");
        Ok(recording)
    }
}

/// The arenas are those of the plan to the byte, and were used up to their ends, but for the last buffers where those are scratch
/// of these small models' units that not every pass needs: up to two of 256 bytes, which is the least a buffer takes.
fn assert_used_as_planned(backend: &CpuBackend, session: &Session, case: &Case) {
    let (device, host) = session.planned_bytes();
    let used = backend.arenas_used();
    let of = |place, bytes| used.iter().find(|a| a.place == place && a.bytes == bytes);
    for (place, planned) in [(Place::Device, device), (Place::Host, host)].into_iter().filter(|(_, b)| b.0 > 0) {
        let arena = of(place, planned).unwrap_or_else(|| panic!("no {place} arena of {planned} in {used:?}: {case:?}"));
        let unused = planned.0 - arena.high_water.align_up(256).0;
        assert!(unused <= 512, "{unused} of {planned} of {place} memory were never used: {case:?}");
    }
    // Beside them only what inputs are staged in: tokens, targets, starts and the learning rate.
    let staged = 4 * (3 * case.global_batch / case.ranks as usize * SEQ + 1);
    let rest: u64 = used.iter().map(|a| a.bytes.0).sum::<u64>() - device.0 - host.0;
    assert_eq!(rest, staged as u64, "{used:?}: {case:?}");
}

/// Largest relative difference of any state tensor, by norm.
pub fn distance(a: &Outcome, b: &Outcome) -> f64 {
    assert_eq!(a.state.keys().collect::<Vec<_>>(), b.state.keys().collect::<Vec<_>>());
    let mut worst: f64 = 0.0;
    for (key, x) in &a.state {
        let y = &b.state[key];
        let (mut diff, mut norm) = (0.0, 0.0);
        for (x, y) in x.iter().zip(y) {
            diff += f64::from(x - y).powi(2);
            norm += f64::from(*y).powi(2);
        }
        worst = worst.max((diff / norm.max(1e-30)).sqrt());
    }
    worst
}

/// The bits of numbers: a NaN equals itself.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A small GPT-2, tied.
pub fn gpt2() -> ModelConfig {
    ModelConfig {
        layers: 2,
        width: 16,
        heads: 2,
        head_dim: 8,
        kv_heads: 2,
        ff: 40,
        vocabulary: 29,
        context: SEQ,
        ..ModelConfig::preset("tiny").expect("tiny is a preset")
    }
}

/// A small Llama, not tied.
pub fn llama() -> ModelConfig {
    ModelConfig {
        layers: 3,
        width: 16,
        heads: 4,
        head_dim: 4,
        kv_heads: 2,
        ff: 24,
        vocabulary: 31,
        context: 2 * SEQ,
        ..ModelConfig::preset("llama-1b").expect("llama-1b is a preset")
    }
}

/// Losses, norms and all state have the same bits.
pub fn assert_same_bits(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.losses, b.losses, "{what}: losses");
    assert_eq!(bits(&a.norms), bits(&b.norms), "{what}: gradient norms");
    for (key, values) in &a.state {
        let same = values.iter().zip(&b.state[key]).all(|(x, y)| x.to_bits() == y.to_bits());
        assert!(same, "{what}: {key:?} differs");
    }
}

/// Losses and all state are within a relative tolerance.
pub fn assert_near(a: &Outcome, b: &Outcome, tolerance: f64, what: &str) {
    let worst = distance(a, b);
    assert!(worst < tolerance, "{what}: state differs by {worst:e}, more than {tolerance:e}");
    for (x, y) in a.losses.iter().zip(&b.losses) {
        assert!((x - y).abs() < tolerance * y.abs(), "{what}: losses {x} and {y}");
    }
}
