"""Checkpoints: format, asynchronous writing, retention, upload to a URL, and resuming."""
