"""Fitted models on disk: versions, their cards, and drift."""
