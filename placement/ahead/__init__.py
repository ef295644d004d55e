"""Simulation of the queue along sampled futures, which gives the start time and the nodes of each request."""
