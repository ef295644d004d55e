"""Clients for foreign protocols, one file for each."""
