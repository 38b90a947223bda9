"""Predictions of the parameters, memory, traffic, time and cost of a run from its configuration."""
