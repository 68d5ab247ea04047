//! Folders of weights as Hugging Face's libraries lay them out.
#![allow(clippy::unwrap_used)] // A failure of a test's own steps is a failed test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gpurun_checkpoint::hf::{ExportTensor, HfWeights, export, export_checkpoint, read_config};
use gpurun_checkpoint::{Checkpoint, Damage, Error, Meta, PieceSource, Save, Section, TensorShape};
use gpurun_types::{DType, Rank};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

fn tensor<'a>(name: &str, shape: &[usize], values: &'a [f32]) -> ExportTensor<'a> {
    ExportTensor {
        name: name.into(),
        shape: shape.to_vec(),
        fill: Box::new(move |start, out| {
            out.copy_from_slice(&values[start as usize..start as usize + out.len()]);
            Ok(())
        }),
    }
}

#[test]
fn what_is_exported_is_read_and_other_readers_read_it_too() {
    let _limit = testkit::time_limit(20);
    let values: Vec<f32> = (0..48).map(|i| (i as f32).sin() * 1e3).collect();
    for (dtype, foreign) in [(DType::F32, Dtype::F32), (DType::Bf16, Dtype::BF16), (DType::F16, Dtype::F16)] {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"model_type": "gpt2", "layer_norm_epsilon": 1e-5});
        let tensors = [tensor("wte.weight", &[6, 8], &values), tensor("ln_f.bias", &[8], &values[..8])];
        let bytes = export(dir.path(), &config, dtype, tensors).unwrap();
        assert_eq!(read_config(dir.path()).unwrap(), config);
        let file = fs::read(dir.path().join("model.safetensors")).unwrap();
        assert_eq!(bytes.0, file.len() as u64);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no partial file is left");

        let theirs = safetensors::SafeTensors::deserialize(&file).unwrap();
        let view = theirs.tensor("wte.weight").unwrap();
        assert_eq!((view.dtype(), view.shape()), (foreign, &[6, 8][..]));
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");

        let weights = HfWeights::open(dir.path()).unwrap();
        let listed: Vec<_> = weights.tensors().collect();
        assert_eq!(listed, [("ln_f.bias", &[8][..], dtype), ("wte.weight", &[6, 8][..], dtype)]);
        let mut found = vec![0.0; 20];
        weights.read("wte.weight", 5, &mut found).unwrap();
        for (x, y) in found.iter().zip(&values[5..]) {
            let expected = match dtype {
                DType::Bf16 => half::bf16::from_f32(*y).to_f32(),
                DType::F16 => half::f16::from_f32(*y).to_f32(),
                _ => *y,
            };
            assert_eq!(x.to_bits(), expected.to_bits());
        }
    }
}

fn foreign_file(path: &Path, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

#[test]
fn sharded_folders_of_other_writers_are_read() {
    let _limit = testkit::time_limit(20);
    let dir = tempfile::tempdir().unwrap();
    let one = 1.0f32.to_le_bytes();
    let halves = [0x00, 0x3c, 0x00, 0xc0]; // 1, -2 in fp16
    let brains = [0x80, 0x3f, 0x00, 0xc0]; // 1, -2 in bf16
    foreign_file(&dir.path().join("a.safetensors"), &[("x", Dtype::F32, &[1], &one), ("y", Dtype::F16, &[2], &halves)]);
    foreign_file(&dir.path().join("b.safetensors"), &[("z", Dtype::BF16, &[2, 1], &brains)]);
    let index = |map: serde_json::Value| {
        let text = json!({"metadata": {"total_size": 12}, "weight_map": map}).to_string();
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    };
    index(json!({"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}));
    let weights = HfWeights::open(dir.path()).unwrap();
    for (name, expected) in [("x", &[1.0][..]), ("y", &[1.0, -2.0]), ("z", &[1.0, -2.0])] {
        let mut found = vec![0.0; expected.len()];
        weights.read(name, 0, &mut found).unwrap();
        assert_eq!(found, expected);
    }
    assert_eq!(weights.shape("z"), Some(&[2, 1][..]));
    assert!(matches!(weights.read("z", 1, &mut [0.0; 2]), Err(Error::OutOfRange { elements: 2, .. })));
    assert!(matches!(weights.read("w", 0, &mut [0.0]), Err(Error::NoTensor { .. })));

    index(json!({"x": "a.safetensors", "w": "b.safetensors"}));
    let error = HfWeights::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("b.safetensors: header: tensor w is not there"), "{error}");
    index(json!({"x": "../a.safetensors"}));
    let error = HfWeights::open(dir.path()).unwrap_err().to_string();
    assert!(error.ends_with("index.json: \"../a.safetensors\" is no file name"), "{error}");
    index(json!({"x": "c.safetensors"}));
    let error = HfWeights::open(dir.path()).unwrap_err().to_string();
    assert!(error.ends_with("c.safetensors: the file is missing"), "{error}");
}

#[test]
fn folders_that_hold_no_weights_say_what_is_missing() {
    let _limit = testkit::time_limit(20);
    let dir = tempfile::tempdir().unwrap();
    let error = HfWeights::open(dir.path().join("none")).unwrap_err().to_string();
    assert!(error.ends_with("none: is no folder"), "{error}");
    let error = HfWeights::open(dir.path()).unwrap_err().to_string();
    assert!(error.ends_with("holds neither model.safetensors nor model.safetensors.index.json"), "{error}");
    fs::write(dir.path().join("pytorch_model.bin"), b"").unwrap();
    let error = HfWeights::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("pickle"), "{error}");
    let error = read_config(dir.path()).unwrap_err().to_string();
    assert!(error.ends_with("holds no config.json"), "{error}");
    fs::write(dir.path().join("config.json"), b"{").unwrap();
    assert!(read_config(dir.path()).unwrap_err().to_string().contains("config.json: is no JSON"));
}

/// A file of one header and some data.
fn raw(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(path, bytes).unwrap();
}

#[test]
fn headers_that_lie_are_refused() {
    let _limit = testkit::time_limit(20);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let a = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let fault = |header: &str, data: usize| {
        raw(&path, header, data);
        HfWeights::open(dir.path()).expect_err(header).to_string()
    };
    let twice = fault(&format!("{{{a},{a}}}"), 8);
    assert!(twice.contains("tensor a is there twice"), "{twice}");
    let overlap = fault(&format!(r#"{{{a},"b":{{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}}}"#), 8);
    assert!(overlap.contains("model.safetensors: header: "), "{overlap}");
    let size = fault(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8);
    assert!(size.contains("model.safetensors: header: "), "{size}");
    let overflow = fault(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#, 8);
    assert!(overflow.contains("model.safetensors: header: "), "{overflow}");
    let integers = fault(r#"{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#, 8);
    assert!(integers.contains("tensor a is I64; F32, BF16 and F16 are supported"), "{integers}");
    let short = fault(&format!("{{{a}}}"), 7);
    assert!(short.contains("truncated at byte"), "{short}");
    let long = fault(&format!("{{{a}}}"), 9);
    assert!(long.contains("bytes long,"), "{long}");
    fs::write(&path, u64::MAX.to_le_bytes()).unwrap();
    let huge = HfWeights::open(dir.path()).unwrap_err();
    assert!(huge.to_string().contains("above the limit"), "{huge}");
    fs::write(&path, b"1234").unwrap();
    let tiny = HfWeights::open(dir.path()).unwrap_err();
    assert!(matches!(tiny, Error::Damaged { damage: Damage::Truncated { found: 4, .. }, .. }), "{tiny}");
}

#[test]
fn an_export_that_fails_leaves_the_weights_that_were_there() {
    let _limit = testkit::time_limit(20);
    let dir = tempfile::tempdir().unwrap();
    let values = [1.0, 2.0];
    export(dir.path(), &json!({}), DType::F32, [tensor("a", &[2], &values)]).unwrap();
    let before = fs::read(dir.path().join("model.safetensors")).unwrap();
    let broken =
        ExportTensor { name: "a".into(), shape: vec![2], fill: Box::new(|_, _| Err("the device is gone".into())) };
    let error = export(dir.path(), &json!({}), DType::F32, [broken]).unwrap_err();
    assert_eq!(error.to_string(), "cannot get the data of a to save it: the device is gone");
    assert_eq!(fs::read(dir.path().join("model.safetensors")).unwrap(), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no partial file is left");
}

/// A GPT-2 of width 2 as it is on the hub: names without a prefix, linear layers `[in, out]`, a mask.
fn gpt2_folder(dir: &Path) {
    let floats = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let six: Vec<f32> = (0..12).map(|i| i as f32).collect();
    foreign_file(
        &dir.join("model.safetensors"),
        &[
            ("wte.weight", Dtype::F32, &[3, 2], &floats(&six[..6])),
            ("h.0.attn.c_attn.weight", Dtype::F32, &[2, 6], &floats(&six)),
            ("h.0.attn.c_proj.weight", Dtype::F32, &[2, 2], &floats(&six[..4])),
            ("h.0.attn.c_proj.bias", Dtype::F32, &[2], &floats(&six[..2])),
            ("h.0.attn.bias", Dtype::F32, &[1, 1, 2, 2], &floats(&six[..4])),
        ],
    );
}

fn gpt2_params() -> Vec<TensorShape> {
    let shape =
        |name: &str, shape: &[usize]| TensorShape { name: format!("transformer.{name}"), shape: shape.to_vec() };
    vec![
        shape("wte.weight", &[3, 2]),
        shape("h.0.attn.c_attn.weight", &[6, 2]),
        shape("h.0.attn.c_proj.weight", &[2, 2]),
        shape("h.0.attn.c_proj.bias", &[2]),
    ]
}

#[test]
fn parameters_of_a_model_are_found_under_the_hubs_names_and_turned() {
    let _limit = testkit::time_limit(20);
    let dir = tempfile::tempdir().unwrap();
    gpt2_folder(dir.path());
    let weights = HfWeights::open(dir.path()).unwrap();
    weights.check_params(&gpt2_params()).unwrap();
    let read = |name: &str, start, n| {
        let mut out = vec![0.0; n];
        weights.read_param(&format!("transformer.{name}"), start, &mut out).map(|()| out)
    };
    // Stored [2, 6] = [[0..6], [6..12]]; ours is [6, 2].
    let turned = [0., 6., 1., 7., 2., 8., 3., 9., 4., 10., 5., 11.];
    assert_eq!(read("h.0.attn.c_attn.weight", 0, 12).unwrap(), turned);
    assert_eq!(read("h.0.attn.c_attn.weight", 5, 4).unwrap(), turned[5..9]);
    assert_eq!(read("h.0.attn.c_proj.weight", 0, 4).unwrap(), [0., 2., 1., 3.], "a square one is turned too");
    assert_eq!(read("h.0.attn.c_attn.weight", 11, 1).unwrap(), [11.]);
    assert_eq!(read("wte.weight", 0, 6).unwrap(), [0., 1., 2., 3., 4., 5.]);
    assert_eq!(read("h.0.attn.c_proj.bias", 1, 1).unwrap(), [1.]);
    assert!(matches!(read("h.0.attn.c_attn.weight", 11, 2), Err(Error::OutOfRange { elements: 12, .. })));
    assert!(matches!(read("h.1.attn.c_attn.weight", 0, 1), Err(Error::NoTensor { .. })));

    let mut params = gpt2_params();
    params[1].shape = vec![2, 6];
    let error = weights.check_params(&params).unwrap_err().to_string();
    assert!(error.ends_with("c_attn.weight has shape [6, 2], the model needs [2, 6]"), "{error}");
    params.remove(1);
    let error = weights.check_params(&params).unwrap_err().to_string();
    assert!(
        error.contains("holds h.0.attn.c_attn.weight, for which the model of its config.json has no place"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_is_exported_and_read_back_as_the_same_model() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let params = gpt2_params();
    let values: Vec<Vec<f32>> = params
        .iter()
        .enumerate()
        .map(|(t, p)| (0..p.elements()).map(|i| (t * 100) as f32 + i as f32).collect())
        .collect();
    let save = Save::begin(out.path(), 1).unwrap();
    let pieces = params
        .iter()
        .zip(&values)
        .flat_map(|(p, v)| Section::ALL.map(|section| PieceSource::from_slice(&p.name, section, 0, v)));
    save.write_rank(Rank(0), pieces).unwrap();
    let meta = Meta {
        step: 1,
        tokens: 0,
        model: json!({}),
        options: json!({}),
        scalars: BTreeMap::new(),
        tensors: params.clone(),
    };
    let checkpoint = Checkpoint::open(save.commit(meta, 1, None).unwrap()).unwrap();
    let dir = out.path().join("export");
    export_checkpoint(&checkpoint, &dir, &json!({"model_type": "gpt2"}), DType::F32).unwrap();
    let weights = HfWeights::open(&dir).unwrap();
    assert_eq!(weights.shape("transformer.h.0.attn.c_attn.weight"), Some(&[2, 6][..]), "as the hub stores it");
    weights.check_params(&params).unwrap();
    for (param, expected) in params.iter().zip(values) {
        let mut found = vec![0.0; expected.len()];
        weights.read_param(&param.name, 0, &mut found).unwrap();
        assert_eq!(found, expected, "{}", param.name);
    }
}
