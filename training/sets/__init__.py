"""Data sets: published traces, recorded runs and the archive, as arrays to fit and judge on."""
