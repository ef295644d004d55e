"""Evaluations: every method beside its fair baseline, on the same data, in one run."""
