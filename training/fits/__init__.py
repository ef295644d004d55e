"""Fits, back-tests, retraining and tracking of models."""
