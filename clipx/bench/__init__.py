"""Benchmarks that compare clipx with open_clip in one run. `python -m clipx.bench`."""
