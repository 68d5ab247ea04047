//! Layers with forward and backward, and how they compose.
//!
//! A [`Layer`] maps `[tokens, input_width]` to `[tokens, output_width]`. [`Sequence`] chains layers and [`Residual`] adds a
//! layer's input to its output; both derive the backward from their parts, so a model made of library layers has none of
//! its own, whole or in two parts (gradient of the input, gradients of the weights). [`LayerUnit`] makes a unit of a layer; [`EmbeddingUnit`] and [`LossHead`] are the two ends of the chain.
//!
//! ```
//! use gpurun_model::layers::{Gelu, LayerUnit, Linear, Norm, Residual, Sequence};
//!
//! # fn main() -> Result<(), gpurun_model::ModelError> {
//! let width = 64;
//! let mlp = Sequence::new(gpurun_model::layers![
//!     Norm::layer("mlp.ln", width, 1e-5),
//!     Linear::new("mlp.up", width, 4 * width),
//!     Gelu::new(4 * width),
//!     Linear::new("mlp.down", 4 * width, width),
//! ])?;
//! let unit = LayerUnit::new("mlp", Residual::new(mlp)?);
//! # let _ = unit;
//! # Ok(())
//! # }
//! ```

mod activation;
mod attention;
mod embedding;
mod layer;
mod linear;
mod loss_head;
mod norm;
mod places;
mod residual;
mod scratch;
mod sequence;
mod unit;

pub use activation::{Gelu, SwiGlu};
pub use attention::{AttentionConfig, Projections, RopeConfig, SelfAttention};
pub use embedding::EmbeddingUnit;
pub use layer::{BackwardIo, Capabilities, ForwardIo, Layer, RestoreIo, WeightsIo};
pub use linear::Linear;
pub use loss_head::LossHead;
pub use norm::Norm;
pub use residual::Residual;
pub use sequence::{Activations, Sequence};
pub use unit::LayerUnit;

/// Boxes each layer: the argument of [`Sequence::new`].
#[macro_export]
macro_rules! layers {
    ($($layer:expr),+ $(,)?) => {{
        let layers: Vec<Box<dyn $crate::layers::Layer>> = vec![$(Box::new($layer)),+];
        layers
    }};
}
