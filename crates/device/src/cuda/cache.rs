//! Files that may be made again: compiled kernels and choices of algorithms. A cache that cannot be read or written, or that is
//! damaged, costs time and nothing else.

use std::path::{Path, PathBuf};

/// `$XDG_CACHE_HOME/gpurun/kernels`, by default in `~/.cache`; `None` where there is no home.
fn folder() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    Some(cache.join("gpurun").join("kernels"))
}

/// Name of what is made from `parts`.
pub(super) fn name(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// What was kept under that name.
pub(super) fn load(name: &str) -> Option<Vec<u8>> {
    read(&folder()?.join(name))
}

/// Keeps bytes under that name, if it can.
pub(super) fn keep(name: &str, bytes: &[u8]) {
    let Some(path) = folder().map(|folder| folder.join(name)) else { return };
    if let Err(error) = write(&path, bytes) {
        tracing::debug!(path = %path.display(), %error, "the cache cannot be written");
    }
}

/// A file is the hash of the bytes, then the bytes. Whatever is not that counts as absent.
fn read(path: &Path) -> Option<Vec<u8>> {
    let file = std::fs::read(path).ok()?;
    let (hash, bytes) = file.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(bytes).as_bytes() == hash).then(|| bytes.to_vec())
}

/// Written apart and then renamed: another process never sees half a file.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let unique = format!("{:x}.{:?}", std::process::id(), std::thread::current().id());
    let part = path.with_extension(unique.replace(['(', ')'], ""));
    let file = [blake3::hash(bytes).as_bytes(), bytes].concat();
    std::fs::write(&part, file).and_then(|()| std::fs::rename(&part, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&part);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cache_counts_as_absent() {
        let _limit = testkit::time_limit(10);
        let folder = std::env::temp_dir().join(format!("gpurun-kernels-{}", std::process::id()));
        let path = folder.join("code");
        write(&path, b"some code").expect("written");
        assert_eq!(read(&path).as_deref(), Some(&b"some code"[..]));
        let mut bytes = std::fs::read(&path).expect("read");
        for damage in [1, 20, bytes.len() - 1] {
            bytes[damage] ^= 1;
            std::fs::write(&path, &bytes).expect("write");
            assert_eq!(read(&path), None);
            bytes[damage] ^= 1;
        }
        std::fs::write(&path, &bytes[..10]).expect("write");
        assert_eq!(read(&path), None);
        assert!(write(&path.join("below a file"), b"x").is_err(), "a folder that cannot be made is an error");
        std::fs::remove_dir_all(&folder).expect("the folder goes");
    }
}
