"""Fetches a URL into the cache, and says what is there and since when."""

from __future__ import annotations

import sys

from clipx.weights.download import fetched

path = fetched(sys.argv[1])
print(path, path.stat().st_mtime_ns)
