"""Simulated nodes, GPUs, ports and jobs, as their exporters show them."""
