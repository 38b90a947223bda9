"""`clipx-sweep report`: one page of a sweep, points grouped by their overrides without the seed."""
