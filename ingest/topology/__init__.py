"""Readers of the places of nodes: topology files, fabric maps and the wiring inside hosts."""
