"""A simulated GPU fleet that serves real exporter pages.

It uses the product only through HTTP and files.
"""
