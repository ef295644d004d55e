"""GPU demand: forecasters, the contest between them, and calibrated quantiles."""
