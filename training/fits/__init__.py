"""Fit, backtest, retrain and track models."""
