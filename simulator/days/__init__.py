"""Days and weeks of jobs without telemetry, played by events."""
