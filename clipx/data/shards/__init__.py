"""WebDataset shards: URL patterns, indices, reads by byte spans, a cache of whole files, and writing."""
