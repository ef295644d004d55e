"""The board: the pipeline's results in one memory-mapped file, and its readers."""
