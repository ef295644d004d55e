"""Replays of a queue over months, on machines that are simpler than the fleet."""
