//! Norms, the decisions of a step, and AdamW: the same bits as on the host.

use gpurun_types::{DType, Lane, View};

use super::check::{float, is, length, shape};
use super::driver::{Launch, arguments};
use super::{CudaBackend, KernelSource, Result, element};
use crate::{AdamW, Backend, LossScaling, ScalarSlot, StepScalars};

const SOURCE: KernelSource = KernelSource::Optimizer;
/// Elements whose squares are summed in one run.
const NORM_RUN: usize = 4096;

impl CudaBackend {
    pub(super) fn norm_partial_op(&self, lane: Lane, src: View, partial: View) -> Result {
        const OP: &str = "norm_partial";
        is(OP, "src", src, DType::F32, src.len)?;
        is(OP, "partial", partial, DType::F64, 1)?;
        let runs = src.len.div_ceil(NORM_RUN);
        let sums = self.workspace(lane, DType::F64.bytes(runs).0)?;
        let list = arguments![self.address(src), src.len, sums];
        // SAFETY: the kernel takes these; the workspace has room for the sum of each run.
        unsafe {
            self.launch(lane, (SOURCE, DType::F32, "norm_runs"), Launch::new((8 * runs).div_ceil(256), 256), list)?;
        }
        let list = arguments![sums, runs, self.address(partial)];
        // SAFETY: as above.
        unsafe { self.launch(lane, (SOURCE, DType::F32, "norm_total"), Launch::new(1, 1024), list) }
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

    pub(super) fn adamw_op(&self, lane: Lane, args: &AdamW) -> Result {
        const OP: &str = "adamw";
        let len = args.master.len;
        is(OP, "master", args.master, DType::F32, len)?;
        for (name, view) in [("m", args.m), ("v", args.v)] {
            if view.dtype != DType::F32 {
                return Err(shape(OP, format!("{name} is {}; moments are kept in fp32", view.dtype)));
            }
            length(OP, name, view, len)?;
        }
        float(OP, "grad", args.grad)?;
        length(OP, "grad", args.grad, len)?;
        is(OP, "scalars", args.scalars, DType::F32, ScalarSlot::COUNT)?;
        if let Some(weight) = args.weight {
            float(OP, "weight", weight)?;
            length(OP, "weight", weight, len)?;
        }
        if lane == Lane::Host {
            return self.adamw_on_host(args);
        }
        if len == 0 {
            return Ok(());
        }
        let name = match (element(args.grad.dtype), args.weight.map_or("float", |w| element(w.dtype))) {
            ("float", "float") => "adamw_float_float",
            ("float", "bf16") => "adamw_float_bf16",
            ("float", _) => "adamw_float_f16",
            ("bf16", "float") => "adamw_bf16_float",
            ("bf16", "bf16") => "adamw_bf16_bf16",
            ("bf16", _) => "adamw_bf16_f16",
            (_, "float") => "adamw_f16_float",
            (_, "bf16") => "adamw_f16_bf16",
            _ => "adamw_f16_f16",
        };
        let [master, m, v, grad, scalars] =
            [args.master, args.m, args.v, args.grad, args.scalars].map(|view| self.address(view));
        let weight = self.optional(args.weight);
        let (beta1, beta2, eps, decay) = (args.beta1, args.beta2, args.eps, args.weight_decay);
        let list = arguments![master, m, v, grad, weight, scalars, len, beta1, beta2, eps, decay];
        // SAFETY: the kernel takes these; lengths were checked.
        unsafe { self.launch(lane, (SOURCE, DType::F32, name), Launch::over(len.div_ceil(4)), list) }
    }

    fn adamw_on_host(&self, args: &AdamW) -> Result {
        let at = |view| self.on_host("adamw", view);
        let args = AdamW {
            master: at(args.master)?,
            m: at(args.m)?,
            v: at(args.v)?,
            grad: at(args.grad)?,
            weight: args.weight.map(at).transpose()?,
            scalars: at(args.scalars)?,
            ..*args
        };
        self.host.adamw(Lane::Host, args)
    }
}
