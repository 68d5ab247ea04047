//! A small model's state, and saves of it.
#![allow(dead_code)] // Each test file uses its own part.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpurun_checkpoint::{Error, Meta, PieceSource, Save, Scalar, Section, TensorShape};
use gpurun_types::Rank;
use serde_json::json;

/// The tensors of the small model, one of them empty.
pub fn tensors() -> Vec<TensorShape> {
    let shape = |name: &str, shape: &[usize]| TensorShape { name: name.into(), shape: shape.to_vec() };
    vec![
        shape("wte.weight", &[17, 8]),
        shape("h.0.ln.weight", &[8]),
        shape("h.0.attn.weight", &[24, 8]),
        shape("h.0.none", &[0, 8]),
        shape("h.0.scale", &[]),
    ]
}

pub fn meta(step: u64) -> Meta {
    Meta {
        step,
        tokens: step * 4096,
        model: json!({"kind": "gpt2", "width": 8}),
        options: json!({"lr": 0.1, "min_lr": 3.0e-5, "tiny": 5e-324, "third": 1.0 / 3.0}),
        scalars: BTreeMap::from([
            ("loss_scale".to_owned(), Scalar::F32(65536.0)),
            ("nan".to_owned(), Scalar::F64(f64::from_bits(0x7ff8_0000_dead_beef))),
            ("good_steps".to_owned(), Scalar::U64(u64::MAX)),
        ]),
        tensors: tensors(),
    }
}

/// The value of an element at a step: any bits, NaN included.
pub fn value(step: u64, tensor: usize, section: Section, element: u64) -> f32 {
    let mix = (step << 40) ^ ((tensor as u64) << 32) ^ ((section as u64) << 28) ^ element;
    f32::from_bits((mix.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32)
}

pub fn values(step: u64, tensor: usize, section: Section) -> Vec<f32> {
    (0..tensors()[tensor].elements()).map(|e| value(step, tensor, section, e)).collect()
}

/// A piece: tensor, section, first element, elements.
pub type Cut = (usize, Section, u64, u64);

/// All state cut evenly over `world` ranks.
pub fn even(world: u32) -> Vec<Vec<Cut>> {
    let mut ranks = vec![Vec::new(); world as usize];
    for (t, tensor) in tensors().iter().enumerate() {
        for section in Section::ALL {
            let share = tensor.elements().div_ceil(u64::from(world));
            for (rank, cuts) in ranks.iter_mut().enumerate() {
                let start = (share * rank as u64).min(tensor.elements());
                cuts.push((t, section, start, share.min(tensor.elements() - start)));
            }
        }
    }
    ranks
}

pub fn source(step: u64, (tensor, section, start, len): Cut) -> PieceSource<'static> {
    PieceSource {
        tensor: tensors()[tensor].name.clone(),
        section,
        start,
        len,
        dtype: gpurun_types::DType::F32,
        fill: Box::new(move |at, out| {
            for (i, x) in out.iter_mut().enumerate() {
                *x = value(step, tensor, section, start + at + i as u64);
            }
            Ok(())
        }),
    }
}

/// Writes the parts of all ranks, without commit.
pub fn write(out: &Path, step: u64, cuts: &[Vec<Cut>]) -> Save {
    let save = Save::begin(out, step).unwrap();
    for (rank, cuts) in cuts.iter().enumerate() {
        save.write_rank(Rank(rank as u32), cuts.iter().map(|cut| source(step, *cut))).unwrap();
    }
    save
}

pub fn save(out: &Path, step: u64, world: u32, keep: Option<usize>) -> PathBuf {
    try_save(out, step, &even(world), keep).unwrap()
}

pub fn try_save(out: &Path, step: u64, cuts: &[Vec<Cut>], keep: Option<usize>) -> Result<PathBuf, Error> {
    write(out, step, cuts).commit(meta(step), cuts.len() as u32, keep)
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// All state of a checkpoint is that of `step`.
pub fn check_state(checkpoint: &gpurun_checkpoint::Checkpoint, step: u64) {
    for (t, tensor) in tensors().iter().enumerate() {
        for section in Section::ALL {
            let mut out = vec![0.0; tensor.elements() as usize];
            checkpoint.read(&tensor.name, section, 0, &mut out).unwrap();
            assert_eq!(bits(&out), bits(&values(step, t, section)), "{section} of {}", tensor.name);
        }
    }
}

/// Names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
