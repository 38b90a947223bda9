"""Console output, run report and figures."""
