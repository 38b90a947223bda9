"""Comparison of a finished run with what a publication reports."""
