"""Features to forecasts and scores."""
