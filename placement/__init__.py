"""The placement engine, which decides about a request on a view of the cluster. It uses no models."""
