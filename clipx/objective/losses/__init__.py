"""Losses of the objectives: kernels over tiles of pairs, temperatures and per-sample state."""
