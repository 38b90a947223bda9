"""Tar shards: patterns of URLs, reading by spans, the cache of whole files, and writing."""
