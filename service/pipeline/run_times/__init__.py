"""Run times in the pipeline: forecasts, their hit rate, and the serving model."""
