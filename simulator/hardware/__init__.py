"""Nodes, GPUs, ports and jobs in motion, as the exporters show them."""
