//! From a model to what the plan needs to know.

use gpurun_device::ScratchSizes;
use gpurun_model::{BatchShape, Model, Tensor};
use gpurun_plan::{ModelSpec, NamedTensor, ParamSpec, UnitId, UnitSpec};
use gpurun_types::DType;

use crate::error::EngineError;

/// The model's sizes for one micro-batch of `shape`.
pub fn model_spec(
    model: &Model,
    shape: BatchShape,
    dtype: DType,
    sizes: &dyn ScratchSizes,
) -> Result<ModelSpec, EngineError> {
    let owners = Owners::of(model);
    let mut units = Vec::with_capacity(model.units.len());
    for unit in &model.units {
        let deferred = unit.deferred(shape, dtype);
        let mut borrows = Vec::new();
        for name in unit.borrows() {
            let (owner, _) = owners.find(&name).ok_or_else(|| {
                EngineError::Config(format!("unit {} borrows parameter {name}, which no unit owns", unit.name()))
            })?;
            if !borrows.contains(&owner) {
                borrows.push(owner);
            }
        }
        units.push(UnitSpec {
            name: unit.name().to_owned(),
            params: unit
                .params()
                .iter()
                .map(|p| ParamSpec { name: p.name.clone(), elements: p.elements(), decay: p.decay })
                .collect(),
            borrows,
            input: unit.input_width() * shape.tokens(),
            output: unit.output_width() * shape.tokens(),
            saved: named(unit.saved(shape, dtype)),
            restorable: unit.restorable(),
            scratch: named(unit.scratch(sizes, shape, dtype)),
            forward_flops: unit.forward_flops_per_token(shape.seq) * shape.tokens() as f64,
            restore_flops: unit.restore_flops_per_token(shape.seq) * shape.tokens() as f64,
            splits: deferred.is_some(),
            deferred: named(deferred.unwrap_or_default()),
            weights_flops: unit.weights_flops_per_token() * shape.tokens() as f64,
        });
    }
    Ok(ModelSpec { units, tokens: shape.tokens() })
}

fn named(tensors: Vec<Tensor>) -> Vec<NamedTensor> {
    tensors.into_iter().map(|t| NamedTensor { name: t.name.to_owned(), elements: t.elements, dtype: t.dtype }).collect()
}

/// Which unit owns which parameter.
pub struct Owners(std::collections::HashMap<String, (UnitId, usize)>);

impl Owners {
    /// The owners of a model's parameters.
    pub fn of(model: &Model) -> Self {
        let mut map = std::collections::HashMap::new();
        for (index, unit) in model.units.iter().enumerate() {
            for (position, param) in unit.params().into_iter().enumerate() {
                map.insert(param.name, (UnitId(index as u32), position));
            }
        }
        Self(map)
    }

    /// The unit and the position of a parameter among that unit's.
    pub fn find(&self, name: &str) -> Option<(UnitId, usize)> {
        self.0.get(name).copied()
    }
}
