"""Predicts parameters, memory, traffic, time and cost of a run from its configuration. `python -m clipx.plan`."""
