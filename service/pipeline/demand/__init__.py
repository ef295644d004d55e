"""Demand in the pipeline: histories, forecasts, board sections and metrics."""
