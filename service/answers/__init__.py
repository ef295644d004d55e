"""The types of the API's answer bodies, in one file for each capability.

The service builds answers from these types, and OpenAPI shows them.
"""
