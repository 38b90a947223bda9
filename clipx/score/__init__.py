"""Scores of samples, and their table."""
