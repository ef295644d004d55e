"""Readers of kernel logs: they follow files and turn driver messages into node events."""
