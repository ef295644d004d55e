"""Ports: how the wishes of adapters reach other systems, one file a system."""
