"""Models of how long jobs run, and of how much longer running jobs run."""
