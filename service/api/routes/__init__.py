"""The HTTP routes, one file a section of the API."""
