"""Offline: data sets, splits, fits, evaluation."""
