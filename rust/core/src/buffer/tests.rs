use std::sync::atomic::Ordering;

use super::*;

#[test]
fn host_buffer_is_zeroed_page_aligned_and_writable() {
    let mut buffer = HostBuffer::new(10_000, true).unwrap();
    assert_eq!(buffer.address() as usize % rustix::param::page_size(), 0);
    assert!(buffer.as_mut_slice().iter().all(|&byte| byte == 0));
    buffer.as_mut_slice()[9_999] = 7;
    assert_eq!(buffer.as_mut_slice()[9_999], 7);
    assert!(buffer.len() >= 10_000);
}

#[test]
fn huge_buffers_begin_and_end_on_huge_pages() {
    for bytes in [1, HUGE_PAGE, HUGE_PAGE + 1] {
        let mut buffer = HostBuffer::new(bytes, true).unwrap();
        assert_eq!(buffer.address() as usize % HUGE_PAGE, 0);
        assert_eq!(buffer.len(), bytes.next_multiple_of(HUGE_PAGE));
        let last = buffer.len() - 1;
        buffer.as_mut_slice()[last] = 9;
        buffer.prefault(0..last + 1).unwrap();
        assert_eq!(buffer.as_mut_slice()[last], 9);
        // Whether there is room for a huge page is the machine's affair.
        drop(buffer.collapse(0..HUGE_PAGE));
        assert_eq!(buffer.as_mut_slice()[last], 9);
    }
}

#[test]
fn ranges_outside_the_buffer_are_refused() {
    let buffer = HostBuffer::new(4096, false).unwrap();
    assert!(buffer.prefault(0..4096).is_ok());
    assert!(buffer.prefault(0..4097).is_err());
    assert!(buffer.collapse(4096..8192).is_err());
    assert!(buffer.place(&[], NodePolicy::Prefer).is_err());
}

#[test]
fn rows_are_filled_in_place() {
    let mut memory = vec![0_u8; 12];
    let sink = PlaneSink::new(&mut memory, 0, 4, 4, 3).unwrap();
    sink.fill(1..3, |bytes| {
        bytes.copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    });
    assert_eq!(sink.addresses().len(), 12);
    assert_eq!(memory, [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn sinks_write_only_their_rows() {
    let mut memory = vec![9_u8; 20];
    {
        let sink = PlaneSink::new(&mut memory, 1, 6, 4, 3).unwrap();
        sink.write(0, &[1, 1, 1, 1]);
        sink.zero(2);
    }
    assert_eq!(
        memory,
        [9, 1, 1, 1, 1, 9, 9, 9, 9, 9, 9, 9, 9, 0, 0, 0, 0, 9, 9, 9]
    );
}

#[test]
fn sinks_that_do_not_fit_are_refused() {
    let mut memory = vec![0_u8; 20];
    assert!(PlaneSink::new(&mut memory, 0, 4, 4, 6).is_err());
    assert!(PlaneSink::new(&mut memory, 1, 4, 4, 5).is_err());
    assert!(PlaneSink::new(&mut memory, 0, 4, 5, 2).is_err());
    assert!(PlaneSink::new(&mut memory, 0, usize::MAX, 4, 3).is_err());
    assert!(PlaneSink::new(&mut memory, 0, 4, 4, 5).is_ok());
    assert!(PlaneSink::new(&mut memory, 99, 4, 4, 0).is_ok());
}

#[test]
#[should_panic(expected = "position 3 of 3")]
fn writing_past_the_last_row_panics() {
    let mut memory = vec![0_u8; 12];
    PlaneSink::new(&mut memory, 0, 4, 4, 3).unwrap().zero(3);
}

#[test]
fn files_that_are_too_short_are_refused() {
    use std::os::fd::AsFd as _;
    let file = tempfile::tempfile().unwrap();
    file.set_len(100).unwrap();
    assert!(HostBuffer::shared(file.as_fd(), 100).is_ok());
    let error = HostBuffer::shared(file.as_fd(), 101)
        .unwrap_err()
        .to_string();
    assert!(error.contains("a file of 100 bytes"), "{error}");
}

#[test]
fn words_are_aligned_and_inside() {
    let mut buffer = HostBuffer::new(10, false).unwrap();
    let held = buffer.len();
    buffer.word(4).unwrap().store(0x0403_0201, Ordering::SeqCst);
    assert_eq!(buffer.word(4).unwrap().load(Ordering::SeqCst), 0x0403_0201);
    assert_eq!(buffer.as_mut_slice()[3..9], [0, 1, 2, 3, 4, 0]);
    for offset in [1, 2, held - 3, held, usize::MAX] {
        assert!(buffer.word(offset).is_none(), "{offset}");
    }
}
