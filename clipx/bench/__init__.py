"""Benchmarks: clipx and open_clip side by side, in one run. `python -m clipx.bench`."""
