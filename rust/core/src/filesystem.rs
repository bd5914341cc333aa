//! The kind of filesystem that a file lives on.

/// The filesystem a file lives on, as far as it decides how to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filesystem {
    /// Short name, e.g. `ext4`; `unknown` where the magic number is not listed here.
    pub name: &'static str,
    /// Whether a page fault may go over a network or to a user-space server, and so hang or fail.
    pub remote: bool,
}

impl Filesystem {
    /// A filesystem about which nothing is known.
    pub const UNKNOWN: Self = Self {
        name: "unknown",
        remote: false,
    };

    /// By the magic number `statfs` reports.
    pub fn from_magic(magic: u64) -> Self {
        let (name, remote) = match magic {
            0xEF53 => ("ext4", false),
            0x5846_5342 => ("xfs", false),
            0x9123_683E => ("btrfs", false),
            0x0102_1994 => ("tmpfs", false),
            0x794C_7630 => ("overlayfs", false),
            0x2FC1_2FC1 => ("zfs", false),
            0xF2F5_2010 => ("f2fs", false),
            0x7371_7368 => ("squashfs", false),
            0xE0F5_E1E2 => ("erofs", false),
            0xCA45_1A4E => ("bcachefs", false),
            0x6969 => ("nfs", true),
            0x6573_5546 => ("fuse", true),
            0x0BD0_0BD0 => ("lustre", true),
            0x0102_1997 => ("9p", true),
            0xFF53_4D42 => ("cifs", true),
            0xFE53_4D42 => ("smb2", true),
            0x00C3_6400 => ("ceph", true),
            0x4750_4653 => ("gpfs", true),
            0x1983_0326 => ("beegfs", true),
            // OpenAFS, and the client that comes with Linux.
            0x5346_414F | 0x6B41_4653 => ("afs", true),
            _ => return Self::UNKNOWN,
        };
        Self { name, remote }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_filesystems_are_recognised() {
        // As linux/magic.h and the clients that are no part of Linux have them.
        let list = [
            (0x6969, "nfs"),
            (0x6573_5546, "fuse"),
            (0x0BD0_0BD0, "lustre"),
            (0x0102_1997, "9p"),
            (0xFF53_4D42, "cifs"),
            (0xFE53_4D42, "smb2"),
            (0x00C3_6400, "ceph"),
            (0x4750_4653, "gpfs"),
            (0x1983_0326, "beegfs"),
            (0x5346_414F, "afs"),
            (0x6B41_4653, "afs"),
        ];
        for (magic, name) in list {
            let remote = Filesystem { name, remote: true };
            assert_eq!(Filesystem::from_magic(magic), remote);
        }
        assert_eq!(
            Filesystem::from_magic(0xEF53),
            Filesystem {
                name: "ext4",
                remote: false
            }
        );
        assert_eq!(
            Filesystem::from_magic(1),
            Filesystem {
                name: "unknown",
                remote: false
            }
        );
    }
}
