"""Parts of `python -m clipx.bench fastclip`: data and sweeps, the search of tuned values, hypotheses."""
