"""Reports: pages, plots and tables of results."""
