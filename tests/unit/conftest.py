"""Fixtures of the tests of data that is cached on this machine."""

from helpers.caches import own_cache, processes

__all__ = ["own_cache", "processes"]
