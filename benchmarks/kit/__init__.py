"""The parts that benchmarks share: cases, processes, load and peers."""
