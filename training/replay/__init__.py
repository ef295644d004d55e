"""Replay recorded telemetry through the code that serves."""
