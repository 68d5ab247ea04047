//! The worker's side of a job: which rank it is, how it meets the others, and what it tells the launcher.

mod place;

pub use place::{Place, PlaceError, Starter};
