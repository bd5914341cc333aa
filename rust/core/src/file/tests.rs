//! Files opened for rows.

use std::io::Write as _;

use super::*;

fn open(file: &CheckpointFile, mapping: Mapping) -> Result<Arc<OpenFile>> {
    OpenFile::open(file, mapping, true)
}

fn temporary(bytes: &[u8]) -> (tempfile::NamedTempFile, CheckpointFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let described = CheckpointFile::of(file.path()).unwrap();
    (file, described)
}

#[test]
fn a_file_is_shared_with_those_who_open_it_alike() {
    let (_file, described) = temporary(&[0; 10]);
    let first = open(&described, Mapping::IfSafe).unwrap();
    let again = open(&described, Mapping::IfSafe).unwrap();
    assert!(Arc::ptr_eq(&first, &again));
    let unmapped = open(&described, Mapping::Never).unwrap();
    assert!(!Arc::ptr_eq(&first, &unmapped) && unmapped.map().is_err());
    let weak = Arc::downgrade(&first);
    drop((first, again));
    assert!(weak.upgrade().is_none(), "sharing keeps nothing open");
}

#[test]
fn a_file_that_changed_is_refused() {
    let (mut file, described) = temporary(&[0; 10]);
    file.write_all(&[0]).unwrap();
    let error = open(&described, Mapping::IfSafe).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }));
    assert!(error.to_string().contains("the file changed"));
}

/// As long as before, but written to between its header and its rows, by way of another descriptor.
#[test]
fn a_file_that_stayed_open_and_was_written_to_is_refused() {
    let (file, described) = temporary(&[0; 10]);
    let handle = Arc::new(File::open(file.path()).unwrap());
    let files = std::slice::from_ref(&described);
    let open = |handle: &Arc<File>| {
        OpenFile::open_all(files, &[Some(Arc::clone(handle))], Mapping::Never, true)
    };
    drop(open(&handle).unwrap());
    std::fs::write(file.path(), [1; 10]).unwrap();
    // A clock that stands still between the two would hide it.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(9);
    file.as_file().set_modified(later).unwrap();
    let error = open(&handle).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }));
    assert!(error.to_string().contains("the file changed"));
}

#[test]
fn direct_reads_work_or_say_why_not() {
    let (_file, described) = temporary(&[7; 5000]);
    let open = open(&described, Mapping::IfSafe).unwrap();
    match open.direct() {
        Ok(direct) => {
            let mut buffer = HostBuffer::new(8192, false).unwrap();
            assert!(direct.alignment().is_power_of_two());
            let tail = open
                .read_at(&mut buffer.as_mut_slice()[..4096], 4096, true)
                .unwrap();
            assert_eq!(
                tail, 904,
                "the kernel returns what is left of an unaligned tail"
            );
        }
        Err(errno) => assert!(errno > 0),
    }
}
