"""Samples to what the models see: windows, frames, fingerprints."""
