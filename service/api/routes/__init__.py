"""The HTTP routes, one file for each section of the API."""
