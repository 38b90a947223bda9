"""Options of our group for clipx."""
