"""A queue played through months, on machines that are simpler than the fleet."""
