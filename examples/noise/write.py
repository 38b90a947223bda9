"""`python examples/noise/write.py SHARE OUT.parquet [SAMPLES]`: the drawn scenes, a share of them with the captions of
other scenes, and whether each has: columns image, captions, label, mismatched."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq

from clipx import compose
from clipx.data.modified import Mismatched

share, out, samples = float(sys.argv[1]), sys.argv[2], int((sys.argv[3:] or ["4000"])[0])
scenes = compose(f"data.samples={samples}").data.open().train
noisy = Mismatched.of(scenes, share, seed=0)
rows = []
for index in range(samples):
    sample = noisy.read(index)
    mismatched = noisy.partner(index) != index
    rows.append({"image": sample.image, "captions": sample.captions, "label": sample.label, "mismatched": mismatched})
pq.write_table(pa.Table.from_pylist(rows), out)
print(f"{out}: {samples:,} samples, {sum(row['mismatched'] for row in rows):,} with the captions of another")
