"""Simulations of days and weeks of jobs without telemetry, event by event."""
