"""Jobs in the pipeline: fingerprints, load, interference and isolation."""
