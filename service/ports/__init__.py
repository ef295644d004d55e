"""Ports: the connections through which adapters write to other systems, one module for each system."""
