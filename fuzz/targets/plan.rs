//! Rows anywhere in files of any size, under every rule: each must be copied exactly once, whole,
//! from a read of its own file.

#![no_main]

use engram_core::plan::{Coalesce, Plan, Want};
use engram_fuzz::Bytes;
use libfuzzer_sys::fuzz_target;

/// The longest row of a table.
const LONGEST: u32 = 64 << 20;

/// The end of the largest file.
const END: u64 = i64::MAX.cast_unsigned();

fuzz_target!(|data: &[u8]| {
    let mut input = Bytes(data);
    let rule = Coalesce {
        unit: 1 << (9 + input.u8() % 4),
        aligned: input.u8() % 2 == 0,
        limit: u64::from(input.u16()),
    };
    let mut base = 0;
    let mut wants = Vec::new();
    while !input.is_empty() && wants.len() < 1000 {
        base = match input.u8() {
            255 => input.u64(),
            254 => base,
            step => u64::from(step) << (input.u8() % 16),
        }
        .min(END);
        let len = match input.u8() {
            255 => 1 + input.u32() % LONGEST,
            small => 1 + u32::from(small),
        };
        let offset = base.min(END - u64::from(len));
        let position = u32::try_from(wants.len()).expect("there are few");
        wants.push(Want {
            file: u32::from(input.u8() % 3),
            len,
            offset,
            lane: 0,
            position,
        });
    }
    let plan = Plan::new(&mut wants.clone(), rule);
    let mut seen = vec![false; wants.len()];
    let mut before = None;
    for read in &plan.reads {
        assert!(
            before <= Some((read.file, read.offset)),
            "reads are in order"
        );
        before = Some((read.file, read.offset));
        if rule.aligned {
            assert_eq!(read.offset % rule.unit, 0);
            assert_eq!(u64::from(read.len) % rule.unit, 0);
        }
        for copy in plan.copies_of(read) {
            let want = wants[copy.position as usize];
            assert!(!std::mem::replace(&mut seen[copy.position as usize], true));
            assert_eq!((want.file, want.len), (read.file, copy.len));
            assert_eq!(want.offset, read.offset + u64::from(copy.within));
            assert!(u64::from(copy.within) + u64::from(copy.len) <= u64::from(read.len));
        }
    }
    assert!(seen.into_iter().all(|seen| seen));
    let distinct: std::collections::HashSet<_> =
        wants.iter().map(|want| (want.file, want.offset)).collect();
    assert_eq!(plan.unique, distinct.len() as u64);
});
