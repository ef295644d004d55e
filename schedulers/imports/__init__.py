"""Queues of other schedulers, as a draft of `queues.toml`: one file a scheduler."""
