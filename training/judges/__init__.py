"""Evaluations: every method is compared with its fair baseline, on the same data, in one run."""
