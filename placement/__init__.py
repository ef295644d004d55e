"""A view and a request in, a decision out. Knows no model."""
