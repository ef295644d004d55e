"""Readers of kernel logs: they follow files and convert driver messages into node events."""
