//! What arguments must be, asked before anything is enqueued.

use gpurun_types::{DType, View};

use super::Result;
use crate::DeviceError;

/// `Err` that names what does not fit.
pub(super) fn shape(operation: &'static str, detail: impl Into<String>) -> DeviceError {
    DeviceError::Shape { operation, detail: detail.into() }
}

/// Checks a view's length.
pub(super) fn length(operation: &'static str, name: &str, view: View, len: usize) -> Result {
    if view.len == len {
        return Ok(());
    }
    Err(shape(operation, format!("{name} has {} elements, {len} are needed", view.len)))
}

/// Checks a view's element type and length.
pub(super) fn is(operation: &'static str, name: &str, view: View, dtype: DType, len: usize) -> Result {
    if view.dtype != dtype {
        return Err(shape(operation, format!("{name} is {}, {dtype} is needed", view.dtype)));
    }
    length(operation, name, view, len)
}

/// Checks that a view holds a floating type that models compute in.
pub(super) fn float(operation: &'static str, name: &str, view: View) -> Result {
    match view.dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(()),
        other => Err(shape(operation, format!("{name} is {other}, a floating type is needed"))),
    }
}
