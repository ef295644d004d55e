"""Offline work: data sets, splits, fits and evaluations."""
