"""Bytes in, SampleBatch and JobEvent out."""
