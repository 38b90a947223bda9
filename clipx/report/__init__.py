"""What a person sees of a run: the console, the report, figures."""
