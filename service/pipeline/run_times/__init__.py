"""Run times in the pipeline: forecasts, their hit rate, and the model that serves."""
