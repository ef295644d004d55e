"""Processes and wiring: pipeline, api, placer, adapters."""
