"""The placement engine: takes a view and a request, and returns a decision. It uses no models."""
