"""A GPU fleet that serves real exporter pages; it knows the product only through HTTP and files."""
