"""Clients for the protocols of other systems, one file for each."""
