"""The types of the API's answer bodies, in one file for each capability.

The service builds answers from them, and OpenAPI shows them.
"""
