"""Commands of clipx-sweep, one module each."""
