"""Ports: the connections through which adapters' wishes reach other systems, one file a system."""
