"""Readers of all inputs: they decode bytes into SampleBatch and JobEvent."""
