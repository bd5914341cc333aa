//! What control groups allow this process: CPU quotas and memory limits, parents included.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel tells which groups this process is in.
const MEMBERSHIP: &str = "/proc/self/cgroup";
/// Where the group hierarchies are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// The groups that bind this process for `controller`, its own first, then every parent, in the
/// unified hierarchy (v2) and in the controller's own (v1).
fn groups(membership: &Path, root: &Path, controller: &str) -> Vec<PathBuf> {
    let text = fs::read_to_string(membership).unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let hierarchy = if controllers.is_empty() {
            root.to_owned()
        } else if controllers.split(',').any(|name| name == controller) {
            root.join(controller)
        } else {
            continue;
        };
        let mut group = PathBuf::from(group.trim_start_matches('/'));
        loop {
            found.push(hierarchy.join(&group));
            if !group.pop() {
                break;
            }
        }
    }
    found
}

fn number(group: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(group.join(name))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// CPUs that the quotas leave, rounded up; `usize::MAX` without a quota.
pub(crate) fn cpus() -> usize {
    cpu_quota(Path::new(MEMBERSHIP), Path::new(ROOT))
}

fn cpu_quota(membership: &Path, root: &Path) -> usize {
    groups(membership, root, "cpu")
        .iter()
        .map(|group| quota_of(group))
        .min()
        .unwrap_or(usize::MAX)
}

fn quota_of(group: &Path) -> usize {
    let (limit, period) = if let Ok(text) = fs::read_to_string(group.join("cpu.max")) {
        let mut fields = text
            .split_whitespace()
            .map(|field| field.parse::<u64>().ok());
        (fields.next().flatten(), fields.next().flatten())
    } else {
        (
            number(group, "cpu.cfs_quota_us"),
            number(group, "cpu.cfs_period_us"),
        )
    };
    match (limit, period) {
        (Some(limit), Some(period)) if period > 0 => usize::try_from(limit.div_ceil(period))
            .unwrap_or(usize::MAX)
            .max(1),
        _ => usize::MAX,
    }
}

/// Bytes that may still be used for page cache without anything being killed or swapped: what the
/// machine has available, or less where a group's limit leaves less. Page cache a group already
/// holds counts as usable, since it is what gives way.
pub fn available_memory() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo(&text, "MemAvailable:"))
        .unwrap_or(u64::MAX);
    machine.min(memory_left(Path::new(MEMBERSHIP), Path::new(ROOT)))
}

/// Bytes of memory that this process could ever use: the machine's, or less where a group's limit
/// is lower.
pub fn memory_limit() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo(&text, "MemTotal:"))
        .unwrap_or(u64::MAX);
    machine.min(limit(Path::new(MEMBERSHIP), Path::new(ROOT)))
}

fn limit(membership: &Path, root: &Path) -> u64 {
    groups(membership, root, "memory")
        .iter()
        .filter_map(|group| limit_of(group))
        .min()
        .unwrap_or(u64::MAX)
}

fn limit_of(group: &Path) -> Option<u64> {
    number(group, "memory.max").or_else(|| number(group, "memory.limit_in_bytes"))
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace()
        .nth(1)?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

fn memory_left(membership: &Path, root: &Path) -> u64 {
    groups(membership, root, "memory")
        .iter()
        .filter_map(|group| {
            let limit = limit_of(group)?;
            let used = number(group, "memory.current")
                .or_else(|| number(group, "memory.usage_in_bytes"))?;
            let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            let cache = ["file", "total_cache"].iter().find_map(|key| {
                let line = stat
                    .lines()
                    .find(|line| line.split(' ').next() == Some(key))?;
                line.split(' ').nth(1)?.parse::<u64>().ok()
            });
            Some(limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
        })
        .min()
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Groups {
        root: tempfile::TempDir,
    }

    impl Groups {
        fn new(membership: &str, files: &[(&str, &str)]) -> Self {
            let root = tempfile::tempdir().unwrap();
            for (name, content) in files {
                let path = root.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            fs::write(root.path().join("membership"), membership).unwrap();
            Self { root }
        }

        fn membership(&self) -> PathBuf {
            self.root.path().join("membership")
        }
    }

    #[test]
    fn quotas_of_parents_count_too() {
        let groups = Groups::new(
            "0::/a/b\n",
            &[
                ("a/cpu.max", "150000 100000\n"),
                ("a/b/cpu.max", "max 100000\n"),
            ],
        );
        assert_eq!(cpu_quota(&groups.membership(), groups.root.path()), 2);
    }

    #[test]
    fn version_one_quotas_are_read() {
        let period = ("cpu/job/cpu.cfs_period_us", "100000");
        let membership = "4:cpu,cpuacct:/job\n2:memory:/job\n";
        let groups = Groups::new(
            membership,
            &[("cpu/job/cpu.cfs_quota_us", "300000"), period],
        );
        assert_eq!(cpu_quota(&groups.membership(), groups.root.path()), 3);
        let groups = Groups::new(membership, &[("cpu/job/cpu.cfs_quota_us", "-1"), period]);
        assert_eq!(
            cpu_quota(&groups.membership(), groups.root.path()),
            usize::MAX
        );
    }

    #[test]
    fn page_cache_of_a_group_counts_as_usable_memory() {
        let groups = Groups::new(
            "0::/a/b\n",
            &[
                ("a/memory.max", "1000\n"),
                ("a/memory.current", "900\n"),
                ("a/memory.stat", "anon 300\nfile 600\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", "800\n"),
            ],
        );
        assert_eq!(memory_left(&groups.membership(), groups.root.path()), 700);
    }

    #[test]
    fn the_lowest_limit_of_all_parents_counts() {
        let groups = Groups::new(
            "3:memory:/a/b\n",
            &[
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/a/memory.limit_in_bytes", "5000\n"),
                ("memory/a/b/memory.limit_in_bytes", "7000\n"),
            ],
        );
        assert_eq!(limit(&groups.membership(), groups.root.path()), 5000);
    }

    #[test]
    fn without_groups_nothing_is_limited() {
        assert_eq!(
            memory_left(Path::new("/nonexistent"), Path::new("/nonexistent")),
            u64::MAX
        );
        assert_eq!(
            cpu_quota(Path::new("/nonexistent"), Path::new("/nonexistent")),
            usize::MAX
        );
    }

    #[test]
    fn memory_available_is_parsed_in_kibibytes() {
        assert_eq!(
            meminfo("MemTotal: 9 kB\nMemAvailable:   12 kB\n", "MemAvailable:"),
            Some(12_288)
        );
    }
}
