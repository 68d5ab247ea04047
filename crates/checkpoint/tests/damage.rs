//! Anything that happens to a checkpoint's bytes is found and named, and the one before is used.
#![allow(clippy::unwrap_used)] // A failure of a test's own steps is a failed test.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{check_state, even, save};
use gpurun_checkpoint::{Checkpoint, Damage, Error, latest, list};

fn open_and_verify(folder: &Path) -> Result<(), Error> {
    Checkpoint::open(folder)?.verify()
}

fn flip(path: &Path, byte: u64, bit: u8) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut value = [0];
    file.read_exact_at(&mut value, byte).unwrap();
    file.write_all_at(&[value[0] ^ (1 << bit)], byte).unwrap();
}

#[test]
fn a_flipped_bit_in_any_byte_is_refused_by_the_files_name() {
    let _limit = testkit::time_limit(60);
    let out = tempfile::tempdir().unwrap();
    let folder = save(out.path(), 1, 2, None);
    open_and_verify(&folder).unwrap();
    for name in common::names(&folder) {
        let path = folder.join(&name);
        for byte in 0..fs::metadata(&path).unwrap().len() {
            let bit = (byte % 8) as u8;
            flip(&path, byte, bit);
            let error = open_and_verify(&folder).expect_err(&format!("{name}, byte {byte}, bit {bit}"));
            assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
            flip(&path, byte, bit);
        }
    }
    open_and_verify(&folder).unwrap();
}

#[test]
fn a_flipped_bit_in_the_data_names_the_piece() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let folder = save(out.path(), 1, 2, None);
    let path = folder.join("rank-1.safetensors");
    // The last piece of rank 1: element 12 of 24 * 8 is v of h.0.attn.weight, second half.
    flip(&path, fs::metadata(&path).unwrap().len() - 1, 6);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let Error::Damaged { damage: Damage::PieceChecksum { piece, .. }, .. } = checkpoint.verify().unwrap_err() else {
        panic!("no checksum mismatch");
    };
    assert_eq!(piece, "v/h.0.attn.weight@96");
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let _limit = testkit::time_limit(60);
    let out = tempfile::tempdir().unwrap();
    let folder = save(out.path(), 1, 1, None);
    for name in common::names(&folder) {
        let path = folder.join(&name);
        let whole = fs::read(&path).unwrap();
        for keep in [0, 1, 7, 8, 9, whole.len() / 3, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..keep]).unwrap();
            let error = Checkpoint::open(&folder).expect_err("cut short");
            assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
            if name != "manifest.json" {
                assert!(
                    error.to_string().ends_with(&format!("truncated at byte {keep} of {}", whole.len())),
                    "{error}"
                );
            }
        }
        let longer = [whole.as_slice(), &[0]].concat();
        fs::write(&path, longer).unwrap();
        Checkpoint::open(&folder).expect_err("a byte too long");
        fs::write(&path, whole).unwrap();
    }
    open_and_verify(&folder).unwrap();
}

#[test]
fn a_missing_file_is_named() {
    let _limit = testkit::time_limit(20);
    for name in ["manifest.json", "rank-0.safetensors", "rank-2.safetensors"] {
        let out = tempfile::tempdir().unwrap();
        let folder = save(out.path(), 1, 3, None);
        fs::remove_file(folder.join(name)).unwrap();
        let error = Checkpoint::open(&folder).unwrap_err();
        assert!(matches!(&error, Error::Damaged { path, damage: Damage::Missing } if path.ends_with(name)), "{error}");
    }
}

#[test]
fn a_file_that_is_cut_after_opening_is_an_error_of_the_read() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let folder = save(out.path(), 1, 1, None);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let file = fs::OpenOptions::new().write(true).open(folder.join("rank-0.safetensors")).unwrap();
    file.set_len(100).unwrap();
    let mut values = [0.0; 8];
    let error = checkpoint.read("h.0.ln.weight", gpurun_checkpoint::Section::V, 0, &mut values).unwrap_err();
    assert!(matches!(error, Error::Damaged { damage: Damage::Truncated { found: 100, .. }, .. }), "{error}");
}

#[test]
fn files_of_two_checkpoints_do_not_mix() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let (first, second) = (save(out.path(), 1, 2, None), save(out.path(), 2, 2, None));
    fs::copy(first.join("rank-1.safetensors"), second.join("rank-1.safetensors")).unwrap();
    let error = open_and_verify(&second).unwrap_err();
    assert!(error.to_string().contains("rank-1.safetensors"), "{error}");
}

#[test]
fn the_newest_good_one_is_used_and_the_others_are_listed_with_their_reasons() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let folders: Vec<_> = (1..=5).map(|step| save(out.path(), step, 2, None)).collect();
    flip(&folders[4].join("rank-0.safetensors"), 1500, 3);
    fs::write(folders[3].join("rank-1.safetensors"), b"").unwrap();
    fs::remove_file(folders[2].join("manifest.json")).unwrap();
    let (checkpoint, refused) = latest(out.path()).unwrap();
    check_state(&checkpoint, 2);
    let reasons: Vec<String> = refused.iter().map(|r| r.reason.to_string()).collect();
    assert_eq!(refused.iter().map(|r| &r.path).collect::<Vec<_>>(), [&folders[4], &folders[3], &folders[2]]);
    assert!(reasons[0].contains("checksum mismatch in"), "{}", reasons[0]);
    assert!(reasons[1].contains("truncated at byte 0 of"), "{}", reasons[1]);
    assert!(reasons[2].contains("manifest.json: the file is missing"), "{}", reasons[2]);

    for folder in &folders[..2] {
        fs::remove_dir_all(folder).unwrap();
    }
    let error = latest(out.path()).unwrap_err();
    assert_eq!(error.refused.len(), 3);
    assert!(error.to_string().contains("no usable checkpoint in"), "{error}");
}

#[test]
fn nothing_there_is_no_checkpoint() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    for folder in [out.path().to_owned(), out.path().join("not there")] {
        assert!(list(&folder).unwrap().is_empty());
        let error = latest(&folder).unwrap_err();
        assert_eq!(error.to_string(), format!("no usable checkpoint in {}", folder.display()));
    }
}

/// Rewrites the manifest with a right checksum.
fn rewrite_manifest(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = folder.join("manifest.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("crc32");
    change(&mut json);
    let mut text = serde_json::to_string(&json).unwrap();
    text.pop();
    let crc = crc32fast::hash(text.as_bytes());
    fs::write(&path, format!("{text},\n\"crc32\":\"{crc:08x}\"}}\n")).unwrap();
}

#[test]
fn a_manifest_that_contradicts_itself_or_the_files_is_refused() {
    let _limit = testkit::time_limit(20);
    type Change = fn(&mut serde_json::Value);
    let cases: [(Change, &str); 10] = [
        (|m| m["version"] = 2.into(), "unknown version 2 of the checkpoint format, this program reads version 1"),
        (|m| m["format"] = "other".into(), "its format is \"other\""),
        (|m| m["files"][0]["name"] = "../rank-0.safetensors".into(), "is no file name"),
        (|m| m["pieces"][0]["file"] = 9.into(), "a piece lies in file 9"),
        (|m| m["pieces"][0]["tensor"] = 9.into(), "a piece belongs to tensor 9"),
        (|m| m["pieces"][0]["start"] = 1.into(), "is missing"),
        (|m| m["pieces"][0]["len"] = u64::MAX.into(), "is there twice"),
        (|m| drop(m["pieces"].as_array_mut().unwrap().pop()), "is missing"),
        (|m| m["tensors"][1]["name"] = "wte.weight".into(), "tensor wte.weight is there twice"),
        (|m| m["pieces"][1]["offset"] = 4096.into(), "is not where and what the manifest says"),
    ];
    let out = tempfile::tempdir().unwrap();
    for (change, expected) in cases {
        let folder = save(out.path(), 1, 2, None);
        rewrite_manifest(&folder, |_| ());
        open_and_verify(&folder).unwrap();
        rewrite_manifest(&folder, change);
        let error = open_and_verify(&folder).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn an_interrupted_save_at_any_point_leaves_the_previous_one() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    save(out.path(), 1, 2, None);
    // Killed after one rank, and after all, before the commit.
    for ranks in [1, 2] {
        drop(common::write(out.path(), 2, &even(2)[..ranks]));
        let (checkpoint, refused) = latest(out.path()).unwrap();
        assert_eq!((checkpoint.meta().step, refused.len()), (1, 0));
    }
    // The same step again, by fewer ranks: nothing of the interrupted save is in it.
    let folder = save(out.path(), 2, 1, None);
    assert_eq!(common::names(&folder), ["manifest.json", "rank-0.safetensors"]);
    let (checkpoint, _) = latest(out.path()).unwrap();
    check_state(&checkpoint, 2);
    assert_eq!(common::names(out.path()), ["step-00000001", "step-00000002"]);
}
