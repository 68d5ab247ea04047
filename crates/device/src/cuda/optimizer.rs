//! Norms, the decisions of a step, and AdamW: the same bits as on the host.

use gpurun_types::{DType, Lane, View};

use super::check::{is, shape};
use super::driver::{Argument, Arguments, Launch, arguments};
use super::{CudaBackend, KernelSource, Result};
use crate::adam::AdamTypes;
use crate::{AdamRun, AdamW, Backend, LossScaling, NormRun, ScalarSlot, StepScalars};

const SOURCE: KernelSource = KernelSource::Optimizer;
/// Elements whose squares are summed by themselves.
const NORM_PIECE: usize = 4096;
/// Runs of one launch, as in the kernel: what its arguments, 4 KiB at most, have room for.
const NORM_RUNS: usize = 120;
const ADAM_RUNS: usize = 48;
/// Elements of a block of AdamW, as in the kernel.
const ADAM_TILE: usize = 4096;

/// Kernels by the types of gradient, moments and weight: fp32, bf16, fp16.
const ADAMW: [[[&str; 3]; 2]; 3] = [
    [
        ["adamw_float_float_float", "adamw_float_float_bf16", "adamw_float_float_f16"],
        ["adamw_float_bf16_float", "adamw_float_bf16_bf16", "adamw_float_bf16_f16"],
    ],
    [
        ["adamw_bf16_float_float", "adamw_bf16_float_bf16", "adamw_bf16_float_f16"],
        ["adamw_bf16_bf16_float", "adamw_bf16_bf16_bf16", "adamw_bf16_bf16_f16"],
    ],
    [
        ["adamw_f16_float_float", "adamw_f16_float_bf16", "adamw_f16_float_f16"],
        ["adamw_f16_bf16_float", "adamw_f16_bf16_bf16", "adamw_f16_bf16_f16"],
    ],
];

fn adamw_kernel(types: AdamTypes) -> &'static str {
    let place = |dtype| match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    };
    ADAMW[place(types.grad)][place(types.moment)][place(types.weight.unwrap_or(DType::F32))]
}

/// Structures of a kernel's argument, in the layout that C gives them: eight-byte words.
#[derive(Default)]
struct Words(Vec<u64>);

impl Words {
    fn halves(&mut self, low: u32, high: u32) {
        self.0.push(u64::from(low) | u64::from(high) << 32);
    }

    /// Unused entries of a table.
    fn fill(&mut self, words: usize) {
        self.0.resize(words, 0);
    }
}

impl Argument for Words {
    fn add(&self, to: &mut Arguments) {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        to.bytes(&bytes);
    }
}

impl CudaBackend {
    pub(super) fn norm_partial_op(&self, lane: Lane, runs: &[NormRun]) -> Result {
        const OP: &str = "norm_partial";
        runs.iter().try_for_each(NormRun::check)?;
        if lane == Lane::Host {
            let at = |run: &NormRun| {
                Ok(NormRun { src: self.on_host(OP, run.src)?, partial: self.on_host(OP, run.partial)? })
            };
            return self.host.norm_partial(lane, &runs.iter().map(at).collect::<Result<Vec<_>>>()?);
        }
        runs.chunks(NORM_RUNS).try_for_each(|runs| self.norm_launch(lane, runs))
    }

    fn norm_launch(&self, lane: Lane, runs: &[NormRun]) -> Result {
        let table = || {
            let (mut words, mut pieces) = (Words::default(), 0);
            for run in runs {
                let bounds = [self.address(run.src), self.address(run.partial), run.src.len as u64, pieces as u64];
                words.0.extend(bounds);
                pieces += run.src.len.div_ceil(NORM_PIECE);
            }
            words.fill(4 * NORM_RUNS);
            words.0.extend([runs.len() as u64, pieces as u64]);
            (words, pieces)
        };
        let (words, pieces) = table();
        let sums = self.workspace(lane, DType::F64.bytes(pieces).0)?;
        let list = arguments![words, sums];
        // SAFETY: the kernel takes these; views were checked and the workspace has room for the sum of each piece.
        unsafe {
            self.launch(
                lane,
                (SOURCE, DType::F32, "norm_pieces"),
                Launch::new((32 * pieces).div_ceil(256), 256),
                list,
            )?;
        }
        let list = arguments![table().0, sums];
        // SAFETY: as above.
        unsafe { self.launch(lane, (SOURCE, DType::F32, "norm_totals"), Launch::new(runs.len(), 256), list) }
    }

    pub(super) fn step_scalars_op(&self, lane: Lane, args: &StepScalars) -> Result {
        const OP: &str = "step_scalars";
        is(OP, "partials", args.partials, DType::F64, args.shards * args.row)?;
        is(OP, "scalars", args.scalars, DType::F32, ScalarSlot::COUNT)?;
        is(OP, "learning_rate", args.learning_rate, DType::F32, 1)?;
        if args.units > args.row {
            return Err(shape(OP, format!("{} units in rows of {}", args.units, args.row)));
        }
        if lane == Lane::Host {
            let args = StepScalars {
                partials: self.on_host(OP, args.partials)?,
                scalars: self.on_host(OP, args.scalars)?,
                learning_rate: self.on_host(OP, args.learning_rate)?,
                ..*args
            };
            return self.host.step_scalars(lane, args);
        }
        let none = LossScaling { growth: 1.0, backoff: 1.0, interval: 1, max: 1.0, min: 1.0 };
        let LossScaling { growth, backoff, interval, max, min } = args.scaling.unwrap_or(none);
        let [partials, scalars, rate] = [args.partials, args.scalars, args.learning_rate].map(|v| self.address(v));
        let (shards, row, units, scaling) = (args.shards, args.row, args.units, args.scaling.is_some());
        let (clip, beta1, beta2) = (args.clip, args.beta1, args.beta2);
        let list = arguments![
            partials, shards, row, units, scalars, rate, clip, beta1, beta2, scaling, growth, backoff, interval, max,
            min
        ];
        // SAFETY: the kernel takes these; lengths were checked.
        unsafe { self.launch(lane, (SOURCE, DType::F32, OP), Launch::new(1, 1), list) }
    }

    pub(super) fn adamw_op(&self, lane: Lane, args: &AdamW<'_>) -> Result {
        let Some(types) = args.types()? else { return Ok(()) };
        if lane == Lane::Host {
            return self.adamw_on_host(args);
        }
        let runs: Vec<&AdamRun> = args.runs.iter().filter(|run| run.master.len > 0).collect();
        for runs in runs.chunks(ADAM_RUNS) {
            let (table, tiles) = self.adam_table(runs)?;
            let list = arguments![table, self.address(args.scalars), args.beta1, args.beta2, args.eps];
            // SAFETY: the kernel takes these; lengths were checked.
            unsafe { self.launch(lane, (SOURCE, DType::F32, adamw_kernel(types)), Launch::new(tiles, 256), list)? };
        }
        Ok(())
    }

    /// The table of runs that the kernel takes, and the blocks that they need.
    fn adam_table(&self, runs: &[&AdamRun]) -> Result<(Words, usize)> {
        let (mut words, mut tiles) = (Words::default(), 0usize);
        for run in runs {
            let [master, m, v, grad] = [run.master, run.m, run.v, run.grad].map(|view| self.address(view));
            words.0.extend([master, m, v, grad, self.optional(run.weight)]);
            words.0.extend([run.master.len as u64, run.rounding.stream, run.rounding.first]);
            let first = u32::try_from(tiles).map_err(|_| shape("adamw", "more elements than one launch can take"))?;
            words.halves(first, run.weight_decay.to_bits());
            tiles += run.master.len.div_ceil(ADAM_TILE);
        }
        words.fill(9 * ADAM_RUNS);
        words.0.push(runs.len() as u64);
        Ok((words, tiles))
    }

    fn adamw_on_host(&self, args: &AdamW<'_>) -> Result {
        let at = |view: View| self.on_host("adamw", view);
        let run = |run: &AdamRun| {
            Ok(AdamRun {
                master: at(run.master)?,
                m: at(run.m)?,
                v: at(run.v)?,
                grad: at(run.grad)?,
                weight: run.weight.map(at).transpose()?,
                ..*run
            })
        };
        let runs = args.runs.iter().map(run).collect::<Result<Vec<_>>>()?;
        self.host.adamw(Lane::Host, &AdamW { runs: &runs, scalars: at(args.scalars)?, ..*args })
    }
}
