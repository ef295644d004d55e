"""The models' inputs, computed from samples: windows, frames and fingerprints."""
