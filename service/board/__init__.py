"""The board: one memory-mapped file with the pipeline's results, and its readers."""
