"""Checkpoints: their format, how they are written while training goes on, copied to a URL and resumed from."""
