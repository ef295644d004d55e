"""Imports of other schedulers' queues as a draft of `queues.toml`, one file for each scheduler."""
