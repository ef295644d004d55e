"""A simulated GPU fleet that serves real exporter pages.

It knows the product only through HTTP and files.
"""
