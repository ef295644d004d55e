"""Models that turn features into forecasts and scores."""
