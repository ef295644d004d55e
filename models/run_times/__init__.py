"""Models of how long jobs run, and of the time that running jobs have left."""
