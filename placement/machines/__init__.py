"""Nodes and GPUs: the view, filters, scorers, and the nodes on which a gang fits."""
