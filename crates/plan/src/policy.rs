//! From a ZeRO stage to where state lives (Rajbhandari et al. 2020).

use gpurun_types::Place;

use crate::error::PlanError;
use crate::spec::{Layout, Policy, Residence};

impl Policy {
    /// The policy of a ZeRO stage, with optimizer state at `optim`. The only code that reads a stage number.
    ///
    /// # Errors
    /// When there is no such stage.
    pub fn for_stage(stage: u8, optim: Place) -> Result<Self, PlanError> {
        use Layout::{Replicated, Sharded};
        let [param, grad, state] = match stage {
            0 => [Replicated, Replicated, Replicated],
            1 => [Replicated, Replicated, Sharded],
            2 => [Replicated, Sharded, Sharded],
            3 => [Sharded, Sharded, Sharded],
            _ => {
                let problem = format!("there is no stage {stage}; choose 0, 1, 2 or 3");
                return Err(PlanError::Setting { setting: "zero", problem });
            }
        };
        Ok(Self {
            param: Residence { layout: param, place: Place::Device },
            grad: Residence { layout: grad, place: Place::Device },
            optim: Residence { layout: state, place: optim },
        })
    }
}
