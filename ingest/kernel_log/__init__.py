"""Kernel logs: follow files, and turn driver messages into node events."""
