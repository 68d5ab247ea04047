//! Lists the project's own sources and documents, so that the executable carries a corpus to train on.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../..").canonicalize()?;
    let mut files = Vec::new();
    for part in ["README.md", "ARCHITECTURE.md", "docs", "crates", "launcher", "examples", "tests"] {
        collect(&root.join(part), &mut files)?;
    }
    files.sort();
    let mut list = String::from("&[\n");
    for file in &files {
        let name = file.strip_prefix(&root).expect("files are below the root");
        // The two debug forms are string literals of Rust.
        writeln!(list, "    ({:?}, include_bytes!({:?})),", name.display().to_string(), file.display().to_string())
            .expect("a string takes every write");
    }
    list.push_str("]\n");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("corpus.rs"), list)
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.exists() {
        return Ok(());
    }
    // A folder's own line makes cargo look again when files come or go.
    println!("cargo::rerun-if-changed={}", path.display());
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            collect(&entry?.path(), files)?;
        }
    } else if path.extension().is_some_and(|e| e == "rs" || e == "md" || e == "cu") {
        files.push(path.to_owned());
    }
    Ok(())
}
