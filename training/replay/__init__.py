"""Replays of recorded telemetry through the code that serves."""
