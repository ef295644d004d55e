"""Kafka as a source and as an output, and the records that travel in it."""
