"""The bodies of the answers as types, one file for each capability.

The service builds them, and OpenAPI shows them.
"""
