"""Indexes and writes shards in threads, unless a test asks for `processes`."""

from helpers.caches import threads

__all__ = ["threads"]
