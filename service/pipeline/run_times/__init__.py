"""Run times in the pipeline: forecasts, their accuracy, and the model in use."""
