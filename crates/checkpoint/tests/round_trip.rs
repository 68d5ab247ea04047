//! What is saved at any partition is read at any other, with the same bits.
#![allow(clippy::unwrap_used)] // A failure of a test's own steps is a failed test.

mod common;

use common::{Cut, bits, check_state, even, meta, save, tensors, try_save, values};
use gpurun_checkpoint::{Checkpoint, Error, PieceSource, Save, Section, latest};
use gpurun_types::{DType, Rank};
use proptest::prelude::*;

/// State cut at arbitrary places and dealt to ranks at random.
fn partition() -> impl Strategy<Value = Vec<Vec<Cut>>> {
    (1usize..6, prop::collection::vec((0u64..40, 0usize..60), 64)).prop_map(|(world, dice)| {
        let mut ranks = vec![Vec::new(); world];
        let mut dice = dice.iter().cycle();
        for (t, tensor) in tensors().iter().enumerate() {
            for section in Section::ALL {
                let mut start = 0;
                while start < tensor.elements() {
                    let (len, rank) = *dice.next().unwrap();
                    // A piece of length 0 is legal, and left out.
                    let len = len.min(tensor.elements() - start);
                    ranks[rank % world].push((t, section, start, len));
                    start += len;
                    if len == 0 {
                        ranks[rank % world].push((t, section, start, 1));
                        start += 1;
                    }
                }
            }
        }
        ranks
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_partition_is_read_at_any_other(written in partition(), read in partition()) {
        let _limit = testkit::time_limit(60);
        let out = tempfile::tempdir().unwrap();
        let folder = try_save(out.path(), 7, &written, None).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        checkpoint.verify().unwrap();
        prop_assert_eq!(checkpoint.world() as usize, written.len());
        for (t, section, start, len) in read.into_iter().flatten() {
            let mut found = vec![0.0; len as usize];
            checkpoint.read(&tensors()[t].name, section, start, &mut found).unwrap();
            let expected = &values(7, t, section)[start as usize..(start + len) as usize];
            prop_assert_eq!(bits(&found), bits(expected));
        }
    }
}

#[test]
fn what_the_checkpoint_says_of_itself_comes_back_with_the_same_bits() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let folder = save(out.path(), 100, 2, None);
    assert_eq!(folder, out.path().join("step-00000100"));
    assert_eq!(common::names(&folder), ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(*checkpoint.meta(), meta(100));
    assert_eq!(checkpoint.meta().options["third"].as_f64().unwrap().to_bits(), (1.0f64 / 3.0).to_bits());
    check_state(&checkpoint, 100);
    // The manifest is plain JSON for other programs.
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(json["version"], 1);
    assert_eq!(json["scalars"]["loss_scale"], "f32:47800000");
}

#[test]
fn the_same_state_makes_the_same_bytes() {
    let _limit = testkit::time_limit(20);
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (a, b) = (save(a.path(), 3, 2, None), save(b.path(), 3, 2, None));
    for name in common::names(&a) {
        assert_eq!(std::fs::read(a.join(&name)).unwrap(), std::fs::read(b.join(&name)).unwrap(), "{name}");
    }
}

#[test]
fn ranks_write_at_the_same_time() {
    let _limit = testkit::time_limit(30);
    let out = tempfile::tempdir().unwrap();
    let cuts = even(8);
    for step in [1, 2, 3] {
        std::thread::scope(|scope| {
            for (rank, cuts) in cuts.iter().enumerate() {
                let out = out.path();
                scope.spawn(move || {
                    let save = Save::begin(out, step).unwrap();
                    save.write_rank(Rank(rank as u32), cuts.iter().map(|c| common::source(step, *c))).unwrap();
                });
            }
        });
        Save::begin(out.path(), step).unwrap().commit(meta(step), 8, Some(2)).unwrap();
    }
    let (checkpoint, refused) = latest(out.path()).unwrap();
    assert!(refused.is_empty());
    check_state(&checkpoint, 3);
    // Reads come from many threads too.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| check_state(&checkpoint, 3));
        }
    });
    assert_eq!(common::names(out.path()), ["step-00000002", "step-00000003"]);
}

#[test]
fn large_tensors_go_through_in_chunks_and_bf16_moments_are_exact() {
    let _limit = testkit::time_limit(60);
    let out = tempfile::tempdir().unwrap();
    let n: u64 = 2_500_003;
    let at = |i: u64| (i % 251) as f32 - 125.0; // exact in bf16
    let save = Save::begin(out.path(), 1).unwrap();
    let tensor = gpurun_checkpoint::TensorShape { name: "big".into(), shape: vec![n as usize] };
    let piece = |section, dtype| PieceSource {
        tensor: "big".into(),
        section,
        start: 0,
        len: n,
        dtype,
        fill: Box::new(move |start, out: &mut [f32]| {
            assert!(out.len() <= 1 << 20, "a chunk of {} elements is not bounded", out.len());
            for (i, x) in out.iter_mut().enumerate() {
                *x = at(start + i as u64);
            }
            Ok(())
        }),
    };
    let pieces = [piece(Section::M, DType::Bf16), piece(Section::Weight, DType::F32), piece(Section::V, DType::Bf16)];
    let bytes = save.write_rank(Rank(0), pieces).unwrap();
    assert!(bytes.0 >= n * 8 && bytes.0 < n * 8 + 1024, "4 + 2 + 2 bytes an element: {bytes}");
    let folder = save.commit(gpurun_checkpoint::Meta { tensors: vec![tensor], ..meta(1) }, 1, None).unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    checkpoint.verify().unwrap();
    for section in Section::ALL {
        let mut found = vec![0.0; 1_200_000];
        checkpoint.read("big", section, 1_100_001, &mut found).unwrap();
        for (i, x) in found.iter().enumerate() {
            assert_eq!(*x, at(1_100_001 + i as u64), "{section} {i}");
        }
    }
}

#[test]
fn a_wrong_name_or_range_is_an_error_that_names_it() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(save(out.path(), 1, 1, None)).unwrap();
    let error = checkpoint.read("h.0.attn.wieght", Section::M, 0, &mut [0.0]).unwrap_err();
    assert!(error.to_string().ends_with("holds no tensor h.0.attn.wieght; did you mean h.0.attn.weight?"), "{error}");
    let error = checkpoint.read("h.0.ln.weight", Section::M, 7, &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { start: 7, end: 9, elements: 8, .. }), "{error}");
    let error = checkpoint.read("h.0.ln.weight", Section::M, u64::MAX, &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
}
