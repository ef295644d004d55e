"""Evaluations: every method is compared with fair baselines on the same data, in one run."""
