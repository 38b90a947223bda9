"""`python -m clipx.index shards=…`: indexes shards before a run, on one machine or as a job array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clipx.cli import cli
from clipx.config.registry import MISSING, frozen, option, register
from clipx.data.shards.cache import Access
from clipx.data.shards.index import RETRY_S, caption_columns, fingerprint
from clipx.data.shards.shard import Shard, index_shards
from clipx.data.source import caption_weights, check_key, count_reasons
from clipx.errors import require
from clipx.escape import json_text
from clipx.storage.local import write_text
from clipx.storage.url import check_path


def _share(key: str, part: str) -> tuple[int, int]:
    """Returns (k, N) of a share k/N. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    k, n = (int(found[1]), int(found[2])) if found else (0, 0)
    require(1 <= k <= n, f"{key}={part} must be k/N with 1 ≤ k ≤ N, e.g. part=3/16 for the third of 16 jobs")
    return k, n


@register("")
@frozen
class IndexSpec:
    """`python -m clipx.index`: indexes shards as a run would, and prints a summary of their content."""

    kind: str = "index"
    """Kind of the command's configuration. Fixed."""

    shards: str = MISSING
    """Shards to index, as data.shards: path, brace pattern, glob, @list.txt or URL; several joined by ::."""

    caption_key: Any = option("txt", check=caption_weights)
    """Location of the captions, as data.caption_key: txt, json.KEY, or several with weights. Decides which samples are
    usable; the weights have no effect on the index."""

    label_key: str | None = option(None, check=partial(check_key, member="cls"))
    """Location of the labels, as data.label_key: cls or json.KEY. Part of the fingerprint only. null: no labels."""

    part: str | None = option(None, check=_share)
    """Share of the shards to index, as k/N with 1 ≤ k ≤ N: for job k of an array of N jobs. null: all shards."""

    manifest: str | None = option(None, when="not part", check=check_path)
    """JSON file to write: url, samples, bytes and digest of each shard, and the total. null: none."""

    @property
    def caption_keys(self) -> Sequence[str]:
        return list(caption_weights("caption_key", self.caption_key))


def index(spec: IndexSpec) -> None:
    """Indexes the shards and prints a summary.

    Shard i belongs to part 1 + i mod N: shards of equal or growing sizes are spread evenly.
    """
    from clipx.data.shards.urls import expand
    from clipx.report.console import stdout_console

    k, n = _share("part", spec.part or "1/1")
    everything = expand(spec.shards, "shards")
    urls = everything[k - 1 :: n]
    console = stdout_console()
    if not urls:
        console.print(f"part {k} of {n} of {len(everything)} shards is empty: nothing to do")
        return
    columns, access = tuple(caption_columns(spec.caption_keys)), Access(RETRY_S)
    shards = index_shards([Shard(url, columns, access) for url in urls])
    console.print(summary_table(spec, shards))
    for line in count_reasons([record for shard in shards for record in (*shard.bad, *shard.notes)]):
        console.print(line)
    if spec.manifest is not None:
        write_manifest(spec, Path(spec.manifest), shards)
        console.print(f"written to {spec.manifest}")


def summary_table(spec: IndexSpec, shards: Sequence[Shard]) -> Any:
    from clipx.report.console import text_table

    part = "" if spec.part is None else f", part {spec.part}"
    row = {
        "shards": f"{len(shards):,}",
        "samples": f"{sum(shard.samples for shard in shards):,}",
        "bytes": f"{sum(shard.size for shard in shards):,}",
        "bad": f"{sum(len(shard.bad) for shard in shards):,}",
        "fingerprint": fingerprint(spec.caption_keys, spec.label_key, [shard.digest for shard in shards]),
    }
    columns = list(row) if spec.part is None else list(row)[:4]
    return text_table(columns, [[row[name] for name in columns]], f"{spec.shards}{part}", right=columns)


def write_manifest(spec: IndexSpec, path: Path, shards: Sequence[Shard]) -> None:
    """Writes url, samples, bytes and digest of each shard, and the total, as JSON."""
    listed = [
        {"url": shard.url, "samples": shard.samples, "bytes": shard.size, "digest": shard.digest} for shard in shards
    ]
    manifest = {
        "caption_key": spec.caption_key,
        "samples": sum(shard.samples for shard in shards),
        "fingerprint": fingerprint(spec.caption_keys, spec.label_key, [shard.digest for shard in shards]),
        "shards": listed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_text(manifest, indent=1) + "\n")


main = cli(index, "index")

if __name__ == "__main__":
    main()
