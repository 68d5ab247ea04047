//! What backends share of AdamW and gradient norms: which arguments fit together.

use gpurun_types::{DType, View};

use crate::{AdamRun, AdamW, DeviceError, NormRun, ScalarSlot};

/// Storage types of all runs of one [`AdamW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdamTypes {
    pub grad: DType,
    pub moment: DType,
    pub weight: Option<DType>,
}

fn shape(operation: &'static str, detail: String) -> DeviceError {
    DeviceError::Shape { operation, detail }
}

fn is(operation: &'static str, name: &str, view: View, dtype: DType, len: usize) -> Result<(), DeviceError> {
    if view.dtype != dtype {
        return Err(shape(operation, format!("{name} is {}, {dtype} is needed", view.dtype)));
    }
    if view.len != len {
        return Err(shape(operation, format!("{name} has {} elements, {len} are needed", view.len)));
    }
    Ok(())
}

impl AdamRun {
    fn views(&self) -> impl Iterator<Item = View> {
        [self.master, self.m, self.v, self.grad].into_iter().chain(self.weight)
    }

    fn types(&self) -> AdamTypes {
        AdamTypes { grad: self.grad.dtype, moment: self.m.dtype, weight: self.weight.map(|w| w.dtype) }
    }
}

impl AdamW<'_> {
    /// Every view that the operation touches.
    pub(crate) fn views(&self) -> impl Iterator<Item = View> {
        self.runs.iter().flat_map(AdamRun::views).chain([self.scalars])
    }

    /// The types of its views; `None` without runs.
    ///
    /// # Errors
    /// When views do not fit together.
    pub(crate) fn types(&self) -> Result<Option<AdamTypes>, DeviceError> {
        const OP: &str = "adamw";
        is(OP, "scalars", self.scalars, DType::F32, ScalarSlot::COUNT)?;
        let Some(types) = self.runs.first().map(AdamRun::types) else { return Ok(None) };
        for (name, dtype) in [("grad", Some(types.grad)), ("weight", types.weight)] {
            if let Some(dtype) = dtype
                && !matches!(dtype, DType::F32 | DType::Bf16 | DType::F16)
            {
                return Err(shape(OP, format!("{name} is {dtype}, a floating type is needed")));
            }
        }
        if !matches!(types.moment, DType::F32 | DType::Bf16) {
            return Err(shape(OP, format!("m is {}; moments are kept in fp32 or bf16", types.moment)));
        }
        for run in self.runs {
            let len = run.master.len;
            is(OP, "master", run.master, DType::F32, len)?;
            for (name, view, dtype) in
                [("m", run.m, types.moment), ("v", run.v, types.moment), ("grad", run.grad, types.grad)]
            {
                is(OP, name, view, dtype, len)?;
            }
            match (run.weight, types.weight) {
                (Some(weight), Some(dtype)) => is(OP, "weight", weight, dtype, len)?,
                (None, None) => {}
                _ => return Err(shape(OP, "some runs have a weight and some have none".to_owned())),
            }
        }
        Ok(Some(types))
    }
}

impl NormRun {
    /// # Errors
    /// When the views do not fit.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const OP: &str = "norm_partial";
        is(OP, "src", self.src, DType::F32, self.src.len)?;
        is(OP, "partial", self.partial, DType::F64, 1)
    }
}
