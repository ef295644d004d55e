"""Parts that benchmarks share: cases, processes, load and peers."""
