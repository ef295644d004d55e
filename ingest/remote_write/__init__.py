"""Prometheus remote write and backfill: decode samples that a Prometheus sends or remembers."""
