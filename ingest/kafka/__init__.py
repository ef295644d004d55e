"""Kafka as a source and as an output, and the formats of its records."""
