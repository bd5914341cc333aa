use std::fmt::Write as _;
use std::io::Write as _;

use proptest::prelude::*;

use super::*;

fn one(name: &str) -> Maps {
    Maps::parse(format!("1000-9000 rw-p 00002000 fe:00 77 \t {name}\n").as_bytes())
}

fn backing(name: &str) -> String {
    one(name).file_range(0x1000..0x2000).unwrap_err().0
}

#[test]
fn an_address_inside_a_file_mapping_is_a_file_offset() {
    let found = one("/models/a b.safetensors").file_range(0x3001..0x9000);
    let expected = FileRange {
        path: "/models/a b.safetensors".into(),
        offset: 0x4001,
    };
    assert_eq!(found, Ok(expected));
}

#[test]
fn memory_that_is_no_file_is_named() {
    assert_eq!(backing(""), "anonymous memory");
    assert_eq!(backing("[heap]"), "the heap");
    assert_eq!(backing("[stack]"), "a stack");
    assert_eq!(
        backing("[anon:glibc malloc]"),
        "anonymous memory [anon:glibc malloc]"
    );
    assert_eq!(
        backing("/memfd:x (deleted)"),
        "shared memory (/memfd:x (deleted))"
    );
    assert_eq!(
        backing("/SYSV0000 (deleted)"),
        "shared memory (/SYSV0000 (deleted))"
    );
    assert_eq!(
        backing("/dev/shm/torch_1"),
        "shared memory (/dev/shm/torch_1)"
    );
    assert_eq!(
        backing("/dev/nvidiactl"),
        "memory of a device driver (/dev/nvidiactl)"
    );
    assert_eq!(
        backing("/models/a.safetensors (deleted)"),
        "a file that has been deleted (/models/a.safetensors)"
    );
}

#[test]
fn a_checkpoint_copied_to_shared_memory_is_a_file() {
    assert!(
        one("/dev/shm/a.safetensors")
            .file_range(0x1000..0x2000)
            .is_ok()
    );
}

#[test]
fn a_file_called_deleted_is_not_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x (deleted)");
    std::fs::write(&path, [0; 8]).unwrap();
    let inode = std::fs::metadata(&path).unwrap().ino();
    let text = format!("1000-9000 r--p 0 fe:00 {inode} {}\n", path.display());
    let found = Maps::parse(text.as_bytes()).file_range(0x1000..0x2000);
    assert_eq!(found.unwrap().path, path);
}

#[test]
fn a_part_outside_every_mapping_is_refused() {
    let maps = one("/a");
    assert!(maps.file_range(0x0fff..0x2000).is_err());
    assert!(maps.file_range(0x8000..0x9001).is_err());
    assert!(maps.file_range(0x9000..0x9001).is_err());
    assert!(maps.file_range(0x1000..0x9000).is_ok());
}

#[test]
fn line_breaks_in_names_are_read_back() {
    let found = one("/a\\012b").file_range(0x1000..0x2000).unwrap();
    assert_eq!(found.path, Path::new("/a\nb"));
}

#[test]
fn own_mappings_are_found() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![7; 20_000]).unwrap();
    let map = crate::map::Map::new(file.as_file(), 20_000).unwrap();
    let address = map.address() as u64;
    let found = Maps::read()
        .unwrap()
        .file_range(address + 5..address + 20_000);
    let path = file.path().canonicalize().unwrap();
    assert_eq!(found, Ok(FileRange { path, offset: 5 }));
    let local = 7_u64;
    let address = std::ptr::from_ref(&local) as u64;
    assert!(
        Maps::read()
            .unwrap()
            .file_range(address..address + 8)
            .is_err()
    );
}

#[test]
fn huge_pages_are_counted_in_the_mappings_touched() {
    let text = "\
1000-9000 rw-p 0 00:00 0 \n\
Size: 32 kB\nRss:                  16 kB\nAnonHugePages:         8 kB\n\
9000-a000 rw-p 0 00:00 0 \n\
Rss:                  4 kB\nAnonHugePages:         4 kB\nTHPeligible:    1\n";
    let counted = |range| count_huge_pages(text.as_bytes(), &range);
    assert_eq!(
        counted(0x1000..0x2000),
        HugePages {
            resident: 16 << 10,
            huge: 8 << 10
        }
    );
    assert_eq!(
        counted(0x8fff..0x9001),
        HugePages {
            resident: 20 << 10,
            huge: 12 << 10
        }
    );
    assert_eq!(counted(0xb000..0xc000), HugePages::default());
}

/// What each page of a little address space is: nothing, anonymous, or a page of file 0 or 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Nothing,
    Anonymous,
    File(u64, u64),
}

/// Runs of pages that belong together, as they would be mapped; each run may be split at any page.
fn spaces() -> impl Strategy<Value = (Vec<Page>, Vec<bool>)> {
    let run = (0_u64..4, 0_u64..6, 1_usize..5).prop_map(|(kind, first, pages)| {
        (0..pages as u64)
            .map(|page| match kind {
                0 => Page::Nothing,
                1 => Page::Anonymous,
                file => Page::File(file - 2, first + page),
            })
            .collect::<Vec<_>>()
    });
    prop::collection::vec(run, 1..8).prop_flat_map(|runs| {
        let pages: Vec<Page> = runs.concat();
        let cuts = prop::collection::vec(any::<bool>(), pages.len());
        (Just(pages), cuts)
    })
}

const PAGE: u64 = 0x1000;
const BASE: u64 = 0x7f00_0000_0000;

/// The lines for `pages`, cut where the pages do not follow one another and where told to.
fn text_of(pages: &[Page], cuts: &[bool]) -> String {
    let mut text = String::new();
    let mut start = 0;
    while start < pages.len() {
        let mut end = start + 1;
        while end < pages.len() && !cuts[end] && follows(pages[end - 1], pages[end]) {
            end += 1;
        }
        let addresses = BASE + start as u64 * PAGE..BASE + end as u64 * PAGE;
        let (offset, inode, name) = match pages[start] {
            Page::Nothing => {
                start = end;
                continue;
            }
            Page::Anonymous => (0, 0, String::new()),
            Page::File(file, page) => (page * PAGE, 40 + file, format!("/files/{file}")),
        };
        writeln!(
            text,
            "{:x}-{:x} r--p {offset:08x} fe:01 {inode}      {name}",
            addresses.start, addresses.end
        )
        .unwrap();
        start = end;
    }
    text
}

fn follows(one: Page, next: Page) -> bool {
    match (one, next) {
        (Page::File(file, page), Page::File(other, after)) => file == other && after == page + 1,
        _ => one == next,
    }
}

proptest! {
    #[test]
    fn ranges_are_traced_as_page_by_page(
        (pages, cuts) in spaces(),
        start in 0_u64..0x8000,
        length in 1_u64..0x6000,
    ) {
        let maps = Maps::parse(text_of(&pages, &cuts).as_bytes());
        let found = maps.file_range(BASE + start..BASE + start + length).ok();
        // The oracle looks every page up on its own.
        let touched: Vec<Page> = (start / PAGE..=(start + length - 1) / PAGE)
            .map(|page| pages.get(page as usize).copied().unwrap_or(Page::Nothing))
            .collect();
        let expected = match touched[0] {
            Page::File(file, page) if touched.windows(2).all(|pair| follows(pair[0], pair[1])) => {
                Some(FileRange {
                    path: format!("/files/{file}").into(),
                    offset: page * PAGE + start % PAGE,
                })
            }
            _ => None,
        };
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn no_text_is_refused_by_a_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let maps = Maps::parse(&text);
        let _ = maps.file_range(0..u64::MAX);
    }

    #[test]
    fn names_survive_the_round_trip(name in "/[ -~\n]{0,30}[!-~]") {
        // Only line breaks are escaped, so a name with a written-out escape is ambiguous.
        prop_assume!(!name.contains("\\012") && !is_memory(name.as_bytes()));
        let line = format!("1000-2000 r--s 0 fe:00 9 {}", name.replace('\n', "\\012"));
        let parsed = super::line(line.as_bytes()).unwrap();
        prop_assert_eq!(parsed.name, name.as_bytes());
        prop_assert!(parsed.shared);
    }
}
