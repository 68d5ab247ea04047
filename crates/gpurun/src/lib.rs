//! gpurun as a library: train a model of one's own with everything the `gpurun` executable does.
//!
//! [`run`] is the whole `main` of a program: it reads the options of `gpurun train` from the command line, takes its place
//! among the ranks that the launcher started (or is the only one), and trains what the closure builds. See
//! `examples/custom_model.rs`.
#![forbid(unsafe_code)]

mod bench;
mod command;
mod corpus;
mod devices;
mod doctor;
mod files;
mod fit;
mod host;
mod measure;
mod offload;
pub mod options;
mod plan;
mod room;
mod run;
mod sample;
mod search;
mod train;
pub mod worker;

pub use bench::bench_main;
pub use doctor::doctor_main;
pub use files::{export_main, tokenize_main};
pub use fit::DoesNotFit;
pub use host::{HostMemory, MemoryLimit, host_memory};
pub use plan::plan_main;
pub use run::{builtin_model, run, train_main};
pub use sample::sample_main;
pub use train::{Board, RankPlace, TrainError, TrainObserver, train};

pub use gpurun_checkpoint as checkpoint;
pub use gpurun_comm as comm;
pub use gpurun_data as data;
pub use gpurun_device as device;
pub use gpurun_engine as engine;
pub use gpurun_model as model;
pub use gpurun_model::layers;
pub use gpurun_plan as plans;
pub use gpurun_types as types;
