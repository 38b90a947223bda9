"""Fetches a URL into the cache, and prints its content and time of modification."""

from __future__ import annotations

import sys

from clipx.weights.download import fetched

path = fetched(sys.argv[1])
print(path, path.stat().st_mtime_ns)
