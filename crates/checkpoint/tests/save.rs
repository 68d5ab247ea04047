//! When a save may fail, what it leaves, and what is pruned.
#![allow(clippy::unwrap_used)] // A failure of a test's own steps is a failed test.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{Cut, check_state, even, meta, names, save, try_save, write};
use gpurun_checkpoint::{Error, Meta, PieceSource, Save, Section, check_out, latest};
use gpurun_types::{DType, Rank};

#[test]
fn pruning_keeps_the_newest_and_never_the_one_just_saved() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    for step in 1..=4 {
        save(out.path(), step, 1, None);
    }
    save(out.path(), 5, 1, Some(3));
    assert_eq!(names(out.path()), ["step-00000003", "step-00000004", "step-00000005"]);
    save(out.path(), 6, 1, Some(0));
    assert_eq!(names(out.path()), ["step-00000006"], "the last one is never removed");
}

#[test]
fn a_damaged_checkpoint_takes_no_place_among_those_that_are_kept() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    for step in 1..=4 {
        save(out.path(), step, 2, None);
    }
    fs::write(out.path().join("step-00000003/rank-1.safetensors"), b"").unwrap();
    save(out.path(), 5, 1, Some(3));
    let kept = ["step-00000002", "step-00000003", "step-00000004", "step-00000005"];
    assert_eq!(names(out.path()), kept);
    save(out.path(), 6, 1, Some(3));
    assert_eq!(names(out.path()), ["step-00000004", "step-00000005", "step-00000006"]);
}

#[test]
fn pruning_leaves_newer_steps_and_what_it_does_not_know() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    for step in [10, 20, 30] {
        save(out.path(), step, 1, None);
    }
    for other in ["notes", "step-5", "step-000000001", "best-step-00000010"] {
        fs::create_dir(out.path().join(other)).unwrap();
    }
    // 30 is damaged, the run is resumed at 20 and saves 25. Neither count nor age may cost it its life.
    fs::remove_file(out.path().join("step-00000030/manifest.json")).unwrap();
    save(out.path(), 25, 1, Some(1));
    let expected = ["best-step-00000010", "notes", "step-000000001", "step-00000025", "step-00000030", "step-5"];
    assert_eq!(names(out.path()), expected);
    assert_eq!(latest(out.path()).unwrap().0.meta().step, 25);
}

#[test]
fn a_commit_removes_what_earlier_interrupted_saves_left() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    write(out.path(), 3, &even(2));
    fs::create_dir(out.path().join(".step-00000002.removed")).unwrap();
    // A rank that is ahead may have begun a later save already: that stays.
    let ahead = Save::begin(out.path(), 6).unwrap();
    save(out.path(), 5, 2, None);
    assert_eq!(names(out.path()), [".step-00000006.partial", "step-00000005"]);
    ahead.abort().unwrap();
    ahead.abort().unwrap();
    assert_eq!(names(out.path()), ["step-00000005"]);
}

#[test]
fn the_same_step_is_replaced_as_a_whole() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let folder = save(out.path(), 5, 4, None);
    fs::write(folder.join("rank-3.safetensors"), b"damaged").unwrap();
    save(out.path(), 5, 2, Some(1));
    assert_eq!(names(out.path()), ["step-00000005"]);
    assert_eq!(names(&folder), ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]);
    check_state(&latest(out.path()).unwrap().0, 5);
}

#[test]
fn a_commit_before_all_ranks_have_written_is_refused() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let error = write(out.path(), 1, &even(3)[..2]).commit(meta(1), 3, None).unwrap_err();
    assert!(matches!(error, Error::MissingPart { rank: Rank(2), .. }), "{error}");
    assert!(names(out.path()).iter().all(|name| name.starts_with('.')), "nothing is published");
}

#[test]
fn parts_that_do_not_make_a_whole_are_refused() {
    let _limit = testkit::time_limit(20);
    let whole = even(2);
    let changed = |change: fn(&mut Vec<Vec<Cut>>)| {
        let mut cuts = whole.clone();
        change(&mut cuts);
        let out = tempfile::tempdir().unwrap();
        let error = try_save(out.path(), 1, &cuts, None).unwrap_err();
        assert!(names(out.path()).iter().all(|name| name.starts_with('.')), "nothing is published");
        error.to_string()
    };
    let gap = changed(|cuts| cuts[1][0].2 += 1);
    assert!(gap.contains("element 68 of weight of wte.weight is missing"), "{gap}");
    let overlap = changed(|cuts| cuts[1][1].2 -= 1);
    assert!(overlap.contains("element 67 of m of wte.weight is there twice"), "{overlap}");
    let short = changed(|cuts| cuts[1][2].3 -= 1);
    assert!(short.contains("element 135 of v of wte.weight is missing"), "{short}");
    let long = changed(|cuts| cuts[1][2].3 += 1);
    assert!(long.contains("v of wte.weight has pieces up to element 137 of 136"), "{long}");
    let both = changed(|cuts| {
        let cut = cuts[0][0];
        cuts[1].push(cut);
    });
    assert!(both.contains("element 0 of weight of wte.weight is there twice"), "{both}");
    let out = tempfile::tempdir().unwrap();
    let foreign = Meta { tensors: common::tensors()[1..].to_vec(), ..meta(1) };
    let error = write(out.path(), 1, &whole).commit(foreign, 2, None).unwrap_err();
    assert!(error.to_string().contains("a piece of wte.weight, which is no tensor of the model"), "{error}");
}

#[test]
#[should_panic(expected = "saves piece m/h.0.ln.weight@0 twice")]
fn a_piece_saved_twice_by_a_rank_is_our_bug() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let cut = (1, Section::M, 0, 8);
    let _ = Save::begin(out.path(), 1).unwrap().write_rank(Rank(0), [common::source(1, cut), common::source(1, cut)]);
}

#[test]
fn a_source_that_fails_is_named_and_leaves_nothing() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    let save = Save::begin(out.path(), 1).unwrap();
    let broken = PieceSource {
        tensor: "wte.weight".into(),
        section: Section::V,
        start: 4,
        len: 8,
        dtype: DType::F32,
        fill: Box::new(|_, _| Err("the device is gone".into())),
    };
    let pieces = [common::source(1, (1, Section::M, 0, 8)), broken];
    let error = save.write_rank(Rank(0), pieces).unwrap_err();
    assert_eq!(error.to_string(), "cannot get the data of v/wte.weight@4 to save it: the device is gone");
    assert!(names(&out.path().join(".step-00000001.partial")).is_empty());
}

#[test]
fn a_folder_that_cannot_be_made_is_found_out_before_training() {
    let _limit = testkit::time_limit(20);
    let out = tempfile::tempdir().unwrap();
    check_out(out.path().join("new/deep")).unwrap();
    assert!(names(&out.path().join("new/deep")).is_empty(), "the check leaves nothing");
    fs::write(out.path().join("file"), b"").unwrap();
    for bad in ["file", "file/deep"] {
        let error = check_out(out.path().join(bad)).unwrap_err();
        assert!(error.to_string().contains(&format!("{}/{bad}", out.path().display())), "{error}");
    }
    let error = check_out("/proc/nothing/can/be/made/here").unwrap_err();
    assert!(error.to_string().starts_with("cannot create folder /proc/nothing"), "{error}");
}

/// Set in the child process, which sees a small disk of its own at that folder.
const SMALL_DISK: &str = "GPURUN_TEST_SMALL_DISK";

/// Runs the test of this name again in its own mount namespace with a disk of 256 KiB. None where that is not permitted.
fn on_a_small_disk(test: &str) -> Option<()> {
    let folder = tempfile::tempdir().unwrap();
    let mounted = "mount -t tmpfs -o size=256k none \"$1\" && exec \"$2\" --exact \"$3\" --nocapture";
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(folder.path());
        command
    };
    if !unshare("mount -t tmpfs none \"$1\"").output().is_ok_and(|o| o.status.success()) {
        return None;
    }
    let child =
        unshare(mounted).arg(std::env::current_exe().unwrap()).arg(test).env(SMALL_DISK, folder.path()).output();
    let child = child.unwrap();
    let text = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "on a small disk: {text}");
    Some(())
}

#[test]
fn a_full_disk_leaves_the_previous_checkpoint_and_says_so() {
    let _limit = testkit::time_limit(30);
    let Some(out) = std::env::var_os(SMALL_DISK) else {
        if on_a_small_disk("a_full_disk_leaves_the_previous_checkpoint_and_says_so").is_none() {
            eprintln!("no mount namespaces here: only the unit test with /dev/full was run");
        }
        return;
    };
    let out = Path::new(&out);
    save(out, 1, 2, None);
    // Fill the disk but for a few KiB: the next save does not fit, and is 9 KiB.
    let mut ballast = vec![0u8; 1 << 20];
    while fs::write(out.join("ballast"), &ballast).is_err() {
        ballast.truncate(ballast.len() - 4096);
    }
    let full = |error: Error| {
        let text = error.to_string();
        assert!(text.starts_with(&format!("disk full: {}/.step-00000002.partial needs ", out.display())), "{text}");
        let previous = format!("The previous checkpoint {}/step-00000001 is intact.", out.display());
        assert!(text.ends_with(&previous), "{text}");
        check_state(&latest(out).unwrap().0, 1);
    };
    let begun = Save::begin(out, 2);
    if let Ok(save) = begun {
        full(save.write_rank(Rank(0), even(1)[0].iter().map(|c| common::source(2, *c))).unwrap_err());
        assert!(names(&out.join(".step-00000002.partial")).is_empty(), "what was written is removed");
        save.abort().unwrap();
    } else {
        full(begun.unwrap_err());
    }
    // Parts fit, the manifest does not.
    fs::remove_file(out.join("ballast")).unwrap();
    let parts = write(out, 2, &even(2));
    while fs::write(out.join("ballast"), &ballast).is_err() {
        ballast.truncate(ballast.len() - 4096);
    }
    full(parts.commit(meta(2), 2, Some(1)).unwrap_err());
    assert_eq!(names(out), ["ballast", "step-00000001"], "what was written is removed");
    // With room again, the same save succeeds.
    fs::remove_file(out.join("ballast")).unwrap();
    save(out, 2, 2, Some(1));
    check_state(&latest(out).unwrap().0, 2);
    assert_eq!(names(out), ["step-00000002"]);
}
