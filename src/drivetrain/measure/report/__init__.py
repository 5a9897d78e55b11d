"""Reports on any runs and sweeps: a table, a CSV file and a page."""
