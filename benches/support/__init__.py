"""What the benchmarks share: options, the checkpoint, row ids, bare loops, the report."""
