"""`python -m clipx.data.index shards=…`: indexes shards before a run, on one machine or as an array of jobs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.data.shards.index import RETRY_S, ShardIndex, caption_columns, fingerprint, index_shards
from clipx.data.source import caption_weights, check_held_out_share, check_key, without_numbers
from clipx.errors import require
from clipx.storage.local import write_atomically
from clipx.storage.url import check_path


@option("")
@dataclass(kw_only=True, slots=True)
class IndexSpec:
    """`python -m clipx.data.index`: indexes shards as a run would, and says what they hold."""

    kind: str = "index"
    shards: str = MISSING  # as data.shards: path, brace pattern, glob, @list.txt or URL; several joined by ::
    caption_key: Any = "txt"  # as data.caption_key: where captions are decides which samples count, weights do not
    label_key: str | None = None  # as data.label_key; it is in the fingerprint only
    held_out_share: float = 0.05  # as data.held_out_share: not part of an epoch
    part: str | None = None  # k/N: the k-th of N shares of the shards, from 1; for an array of N jobs
    manifest: str | None = None  # a JSON file to write: each shard's url, samples, bytes and digest, and the total
    retry_s: float = RETRY_S  # as data.retry_s

    def __post_init__(self) -> None:
        caption_weights("caption_key", self.caption_key)
        check_key("label_key", self.label_key, "cls")
        check_held_out_share(self.held_out_share)
        if self.manifest is not None:
            check_path("manifest", self.manifest)
        k, n = self.share
        require(1 <= k <= n, f"part={self.part} must be k/N with 1 ≤ k ≤ N, e.g. part=3/16 for the third of 16 jobs")
        require(
            self.part is None or self.manifest is None,
            f"manifest={self.manifest} is of all shards, part={self.part} reads a share: give it after the last part",
        )

    @property
    def caption_keys(self) -> Sequence[str]:
        return list(caption_weights("caption_key", self.caption_key))

    @property
    def share(self) -> tuple[int, int]:
        """(k, N) of `part`; (0, 0) where it is neither."""
        if self.part is None:
            return 1, 1
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part)
        return (int(found[1]), int(found[2])) if found else (0, 0)


def index(spec: IndexSpec) -> None:
    """Shard i belongs to part 1 + i mod N: shards of one size or growing ones spread evenly."""
    from clipx.data.shards.urls import expand
    from clipx.report.console import stdout_console

    k, n = spec.share
    everything = expand(spec.shards, "shards")
    urls = everything[k - 1 :: n]
    console = stdout_console()
    if not urls:
        console.print(f"part {k} of {n} of {len(everything)} shards is empty: nothing to do")
        return
    indices = index_shards(urls, *caption_columns(spec.caption_keys), retry_s=spec.retry_s)
    console.print(summary_table(spec, indices))
    for line in _bad_sample_summary(indices):
        console.print(line, markup=False)
    if spec.manifest is not None:
        write_manifest(spec, Path(spec.manifest).expanduser(), urls, indices)
        console.print(f"written to {spec.manifest}", markup=False)


def summary_table(spec: IndexSpec, indices: Sequence[ShardIndex]) -> Any:
    from rich.table import Table as RichTable

    samples = sum(index.samples for index in indices)
    held_out = int(samples * spec.held_out_share)
    part = "" if spec.part is None else f", part {spec.part}"
    table = RichTable(title=f"{spec.shards}{part}", title_justify="left")
    row = {
        "shards": f"{len(indices):,}",
        "samples": f"{samples:,}",
        "bytes": f"{sum(index.size for index in indices):,}",
        "bad": f"{sum(len(index.bad) for index in indices):,}",
        "epoch length": f"{samples - held_out:,} samples" + (f" ({held_out:,} held out)" if held_out else ""),
        "fingerprint": fingerprint(spec.caption_keys, spec.label_key, indices),
    }
    for name in row if spec.part is None else list(row)[:4]:
        table.add_column(name, justify="right")
    table.add_row(*list(row.values())[: len(table.columns)])
    return table


def _bad_sample_summary(indices: Sequence[ShardIndex], most: int = 10) -> list[str]:
    """How often each reason occurs, with an example."""
    bad = [item for index in indices for item in index.bad]
    reasons = [without_numbers(item.reason) for item in bad]
    counts = Counter(reasons)
    lines = [
        f"{count:,} × {bad[reasons.index(reason)].reason}: {bad[reasons.index(reason)].key}"
        + (" …" if count > 1 else "")
        for reason, count in counts.most_common(most)
    ]
    return lines + ([f"and {len(counts) - most} reasons more"] if len(counts) > most else [])


def write_manifest(spec: IndexSpec, path: Path, urls: Sequence[str], indices: Sequence[ShardIndex]) -> None:
    """Writes each shard's url, samples, bytes and digest, and the total, as JSON."""
    shards = [
        {"url": url, "samples": index.samples, "bytes": index.size, "digest": index.digest}
        for url, index in zip(urls, indices, strict=True)
    ]
    manifest = {
        "caption_key": spec.caption_key,
        "samples": sum(index.samples for index in indices),
        "fingerprint": fingerprint(spec.caption_keys, spec.label_key, indices),
        "shards": shards,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda other: Path(other).write_text(json.dumps(manifest, indent=1) + "\n"))


main = cli(index, "index")

if __name__ == "__main__":
    main()
