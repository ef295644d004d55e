"""A weather service for GPU fleets. The packages in here are links to the folders beside it."""
