//! Host memory that this process may still take: what the kernel has, and what control groups allow.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpurun_types::Bytes;

/// Memory of the host, as one process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Of the machine.
    pub total: Bytes,
    /// That can be taken without swapping and without passing a limit.
    pub available: Bytes,
    /// The control group that allows least, when one allows less than the machine has.
    pub limit: Option<MemoryLimit>,
}

/// A control group's limit on memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Folder of the group, for messages.
    pub group: PathBuf,
    /// What its processes may use together.
    pub limit: Bytes,
    /// What they use now, without file cache, which the kernel gives back when memory is wanted.
    pub used: Bytes,
}

impl MemoryLimit {
    fn left(&self) -> Bytes {
        Bytes(self.limit.0.saturating_sub(self.used.0))
    }
}

/// Memory of this host, from `/proc/meminfo` and the memory limits (cgroup v1 and v2) of this process's control group and of
/// those that it is in.
///
/// # Errors
/// When `/proc` cannot be read. Control groups that cannot be read are taken to allow everything.
pub fn host_memory() -> io::Result<HostMemory> {
    read(Path::new("/"))
}

/// As [`host_memory`], with `proc` and the mounted control groups below `root`.
fn read(root: &Path) -> io::Result<HostMemory> {
    let text = fs::read_to_string(root.join("proc/meminfo"))?;
    let line = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = value.and_then(|v| v.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| Bytes(kib * 1024)).ok_or_else(|| io::Error::other(format!("/proc/meminfo has no line {name}")))
    };
    let (total, free) = (line("MemTotal")?, line("MemAvailable")?);
    let tightest = limits(root).into_iter().filter(|l| l.limit < total).min_by_key(MemoryLimit::left);
    let available = tightest.as_ref().map_or(free, |limit| free.min(limit.left()));
    Ok(HostMemory { total, available, limit: tightest })
}

/// The most memory that this process has had at any time; `None` where the kernel does not tell.
pub(crate) fn process_high_water() -> Option<Bytes> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| Bytes(kib * 1024))
}

/// Lets [`process_high_water`] count from what this process has now. Where the kernel does not allow it, the mark stays.
pub(crate) fn reset_high_water() {
    let _stays = fs::write("/proc/self/clear_refs", "5");
}

/// Files and words of one version of control groups.
struct Version {
    fs_type: &'static str,
    /// The mount option that tells the memory hierarchy from others.
    option: Option<&'static str>,
    limit: &'static str,
    used: &'static str,
    /// Names of the lines of `memory.stat` that together are file cache, of the group and all below it.
    cache: [&'static str; 2],
}

const VERSIONS: [Version; 2] = [
    Version {
        fs_type: "cgroup",
        option: Some("memory"),
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        cache: ["total_inactive_file", "total_active_file"],
    },
    Version {
        fs_type: "cgroup2",
        option: None,
        limit: "memory.max",
        used: "memory.current",
        cache: ["inactive_file", "active_file"],
    },
];

/// Limits of this process's groups, innermost first.
fn limits(root: &Path) -> Vec<MemoryLimit> {
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    let (mounts, groups) = (read("proc/self/mountinfo"), read("proc/self/cgroup"));
    let mut all = Vec::new();
    for version in &VERSIONS {
        let Some(group) = groups.lines().find_map(|line| group_of(line, version)) else { continue };
        let Some((mounted, at)) = mounts.lines().find_map(|line| mount_of(line, version)) else { continue };
        let top = root.join(at.strip_prefix("/").unwrap_or(&at));
        // In a namespace of its own the group may lie outside of what is mounted: then the mount's top is nearest.
        let below = group.strip_prefix(&mounted).unwrap_or(Path::new(""));
        let mut folder = top.join(below);
        while folder.starts_with(&top) {
            all.extend(limit_of(&folder, version));
            if !folder.pop() {
                break;
            }
        }
    }
    all
}

/// The group that a line of `/proc/self/cgroup` names, `4:memory:/job` or `0::/job`.
fn group_of(line: &str, version: &Version) -> Option<PathBuf> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let ours = match version.option {
        Some(option) => controllers.split(',').any(|c| c == option),
        None => number == "0" && controllers.is_empty(),
    };
    ours.then(|| PathBuf::from(path))
}

/// Which group is mounted where, from a line of `/proc/self/mountinfo`.
fn mount_of(line: &str, version: &Version) -> Option<(PathBuf, PathBuf)> {
    let (before, after) = line.split_once(" - ")?;
    let (mut before, mut after) = (before.split(' ').skip(3), after.split(' '));
    let (group, at) = (before.next()?, before.next()?);
    let (fs_type, options) = (after.next()?, after.nth(1)?);
    let ours = fs_type == version.fs_type && version.option.is_none_or(|o| options.split(',').any(|x| x == o));
    ours.then(|| (PathBuf::from(group), PathBuf::from(at)))
}

fn limit_of(folder: &Path, version: &Version) -> Option<MemoryLimit> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    // `max`, and the root group's lack of a file, are no limit.
    let limit = number(version.limit)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| version.cache.contains(name))
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum();
    let used = number(version.used)?.saturating_sub(cache);
    Some(MemoryLimit { group: folder.to_owned(), limit: Bytes(limit), used: Bytes(used) })
}

#[cfg(test)]
mod tests {
    // A failed unwrap is a failed test.
    #![allow(clippy::unwrap_used)]

    use super::*;

    const GIB: u64 = 1 << 30;

    /// A host of 64 GiB, 48 of them available, whose files are as given.
    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let meminfo =
            "MemTotal:       67108864 kB\nMemFree:         1000000 kB\nMemAvailable:   50331648 kB\nBuffers: 1 kB\n";
        for (path, text) in [("proc/meminfo", meminfo)].iter().chain(files) {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn memory(files: &[(&str, &str)]) -> (u64, Option<(String, u64, u64)>) {
        let dir = host(files);
        let memory = read(dir.path()).unwrap();
        assert_eq!(memory.total, Bytes(64 * GIB));
        let limit = memory.limit.map(|l| {
            let group = l.group.strip_prefix(dir.path()).unwrap();
            (group.display().to_string(), l.limit.0, l.used.0)
        });
        (memory.available.0, limit)
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const STAT: &str = "anon 7\nfile 3221225472\ninactive_file 1073741824\nactive_file 2147483648\n";

    #[test]
    fn this_host_has_memory() {
        let _limit = testkit::time_limit(10);
        let memory = host_memory().unwrap();
        assert!(memory.available <= memory.total && memory.available.0 > 1 << 20, "{memory:?}");
    }

    #[test]
    fn without_groups_the_kernel_alone_counts() {
        let _limit = testkit::time_limit(10);
        assert_eq!(memory(&[]), (48 * GIB, None));
        // Groups without limits, version 2 and 1; and one above what the machine has.
        let files = [("proc/self/mountinfo", V2), ("proc/self/cgroup", "0::/job\n")];
        let max = [("sys/fs/cgroup/job/memory.max", "max\n"), ("sys/fs/cgroup/job/memory.current", "5\n")];
        assert_eq!(memory(&[&files[..], &max].concat()), (48 * GIB, None));
        let files = [("proc/self/mountinfo", V1), ("proc/self/cgroup", "4:memory:/\n0::/\n")];
        let most = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n"),
        ];
        assert_eq!(memory(&[&files[..], &most].concat()), (48 * GIB, None));
    }

    #[test]
    fn a_version_2_limit_counts_without_file_cache() {
        let _limit = testkit::time_limit(10);
        let files = [
            ("proc/self/mountinfo", V2),
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/step/memory.max", "17179869184\n"),
            ("sys/fs/cgroup/job/step/memory.current", "8589934592\n"),
            ("sys/fs/cgroup/job/step/memory.stat", STAT),
        ];
        let step = ("sys/fs/cgroup/job/step".to_owned(), 16 * GIB, 5 * GIB);
        assert_eq!(memory(&files), (11 * GIB, Some(step)));
        // The group around it allows less.
        let around = [
            ("sys/fs/cgroup/job/memory.max", "12884901888\n"),
            ("sys/fs/cgroup/job/memory.current", "10737418240\n"),
            ("sys/fs/cgroup/job/memory.stat", STAT),
        ];
        let job = ("sys/fs/cgroup/job".to_owned(), 12 * GIB, 7 * GIB);
        assert_eq!(memory(&[&files[..], &around].concat()), (5 * GIB, Some(job)));
        // More is used than is allowed: nothing is left.
        let over = [("sys/fs/cgroup/job/memory.max", "1024\n"), ("sys/fs/cgroup/job/memory.current", "2048\n")];
        assert_eq!(memory(&[&files[..], &over].concat()).0, 0);
    }

    #[test]
    fn a_version_1_limit_counts_where_its_hierarchy_is_mounted() {
        let _limit = testkit::time_limit(10);
        let group = "9:name=systemd:/\n4:memory,hugetlb:/docker/abc\n1:cpu:/docker/abc\n0::/\n";
        let limit = |folder: &str| {
            [("memory.limit_in_bytes", "4294967296\n"), ("memory.usage_in_bytes", "3221225472\n")]
                .map(|(file, text)| (format!("{folder}/{file}"), text))
        };
        let check = |mounts: &str, folder: &str| {
            let mut files = vec![("proc/self/mountinfo", mounts), ("proc/self/cgroup", group)];
            let stat = format!("{folder}/memory.stat");
            files.push((&stat, "inactive_file 0\ntotal_inactive_file 1073741824\ntotal_active_file 0\n"));
            let limit = limit(folder);
            files.extend(limit.iter().map(|(path, text)| (path.as_str(), *text)));
            assert_eq!(memory(&files), (2 * GIB, Some((folder.to_owned(), 4 * GIB, 2 * GIB))), "{mounts}");
        };
        check(V1, "sys/fs/cgroup/memory/docker/abc");
        // In a container: its group is the top of what is mounted, or its name lies outside.
        check(&V1.replace("0:32 / ", "0:32 /docker/abc "), "sys/fs/cgroup/memory");
        check(&V1.replace("0:32 / ", "0:32 /else "), "sys/fs/cgroup/memory");
    }

    #[test]
    fn a_line_that_is_missing_is_named() {
        let _limit = testkit::time_limit(10);
        let dir = host(&[("proc/meminfo", "MemTotal: 5 kB\n")]);
        assert!(read(dir.path()).unwrap_err().to_string().contains("MemAvailable"));
    }
}
