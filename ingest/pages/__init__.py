"""Exporter pages: how they are fetched, parsed and turned into series."""
