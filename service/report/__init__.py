"""Reports on finished and running runs, for the terminal and as an HTML page."""
