"""`python examples/noise/found.py NOISY.parquet KEPT.npy`: how many of the samples that are not kept are mismatched."""

import sys

import numpy as np
import pyarrow.parquet as pq

mismatched = pq.read_table(sys.argv[1], columns=["mismatched"])["mismatched"].to_numpy()
removed = np.ones(len(mismatched), dtype=bool)
removed[np.load(sys.argv[2])] = False
found = (removed & mismatched).sum()
print(f"removed: {removed.sum():,}, mismatched of these: {found / removed.sum():.1%}")
print(f"mismatched: {mismatched.sum():,}, removed of these: {found / mismatched.sum():.1%}")
