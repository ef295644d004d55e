"""Event-by-event simulations of days and weeks of jobs, without telemetry."""
