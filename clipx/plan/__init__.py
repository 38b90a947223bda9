"""What a run needs, from its configuration alone. `python -m clipx.plan`."""
