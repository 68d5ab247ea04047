//! Why there is no plan.

use crate::verify::VerifyError;

/// Why a plan cannot be built.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// One setting that cannot be.
    #[error("{setting}: {problem}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What is wrong, and what would work.
        problem: String,
    },
    /// Two settings that cannot go together.
    #[error("{first} and {second} cannot go together: {problem}")]
    Together {
        /// One setting.
        first: String,
        /// The other.
        second: String,
        /// Why, and what would work.
        problem: String,
    },
    /// The model's description contradicts itself: a bug of whoever made it.
    #[error("the model's description: {0}")]
    Model(String),
    /// The plan did not pass its own verification: a bug of the passes.
    #[error("the plan does not verify (a bug in gpurun): {0}")]
    Verify(#[from] VerifyError),
}
