"""Prometheus remote write and backfill: samples that a Prometheus sends, or has stored."""
