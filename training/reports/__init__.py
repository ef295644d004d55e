"""Reports: HTML pages, plots and tables of results."""
