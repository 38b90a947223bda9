"""`python -m clipx.prepare source=… out=…`: converts images and captions into WebDataset shards.

The layout is img2dataset's: 00000.tar with 000000000.jpg, .json, .txt, and 00000_stats.json next to it. A shard is
written under a temporary name and renamed when it is complete, its stats file after it. A kill therefore leaves
complete shards only.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.cli import cli
from clipx.config.registry import MISSING, frozen, option, register
from clipx.data.csv import Columns, check_separator
from clipx.data.shards.write import ShardSample, run_in_pool, write_samples
from clipx.data.source import BadRecord, BadSample, Sample, caption_text, without_numbers
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.errors import DataError, require
from clipx.escape import escaped, json_text
from clipx.extra.prepare.raw import SampleRange, open_raw
from clipx.extra.prepare.resize import MAX_PIXELS, Resize, shard_image
from clipx.storage.local import write_atomically, write_text
from clipx.storage.part_store import PartStore
from clipx.storage.url import check_path

if TYPE_CHECKING:
    from clipx.extra.prepare.index import IndexSpec

_FIX = "make room, or give another folder with out=…"
_PLAN = "prepare.json"


@register("")
@frozen
class PrepareSpec:
    """Converts images and captions into WebDataset shards."""

    kind: str = "prepare"
    """Name of the command whose options these are: prepare."""

    source: str = MISSING
    """Input: a table (CSV, TSV, Parquet) of image paths and captions; a Parquet file with embedded images, local or at
    a URL; a folder of name.jpg (or png, jpeg, webp: the first of these) and name.txt files, or of tables. Several
    inputs: a brace or glob pattern, @list.txt, or inputs joined by ::."""

    out: str = option(MISSING, check=check_path)
    """Local folder for the shards, created if missing. The command continues an interrupted run in it."""

    image_column: str = "filepath"
    """Column of a table with the image paths, relative to the folder of the table. In Parquet, also a column with the
    encoded images as bytes, or as {bytes, path} (the format of Hugging Face data sets)."""

    caption_column: str = "caption"
    """Column of a table with the captions. In Parquet with embedded images, it may hold a list of captions."""

    label_column: str | None = None
    """Column of a table with the label of each image, a class index or class name, stored in the json member of the
    sample. null: no labels."""

    separator: str | None = option(None, check=check_separator)
    """Separator of the columns of a CSV table: one character, or comma, semicolon, tab or pipe. null: tab in a .tsv
    file, else comma."""

    samples_per_shard: int = option(10_000, ge=1)
    """Number of source samples per shard. Dropped samples count, so a shard can hold fewer."""

    resize: Resize = Resize.no
    """Resize mode, as in img2dataset. no: store images unchanged, byte for byte. border: scale the longer side to size
    and pad with white to a square. keep_ratio: scale the shorter side to size. keep_ratio_largest: scale the longer
    side to size. center_crop: scale the shorter side to size and crop the central square."""

    size: int = option(256, ge=1, unit="pixels", when="resize != no")
    """Target length of the side that resize scales."""

    only_shrink: bool = option(True, when="resize != no")
    """Stores images whose side is size pixels or shorter unchanged instead of enlarging them."""

    quality: int = option(95, ge=1, le=100, when="resize != no")
    """JPEG quality of resized images."""

    processes: int = option(0, ge=0)
    """Number of worker processes. 0: one per available core."""

    @property
    def columns(self) -> Columns:
        """(image_column, caption_column, label_column)."""
        return self.image_column, self.caption_column, self.label_column


def _write_shard(spec: PrepareSpec, out: Path, job: tuple[int, Sequence[SampleRange]]) -> None:
    """Writes a shard and its stats file. Sample i of the source has the key i, even if samples before it were dropped.

    Args:
        job: (number of the shard, sample ranges of the shard).
    """
    number, ranges = job
    dropped: list[tuple[str, str]] = []
    count = 0

    def samples() -> Iterator[ShardSample]:
        nonlocal count
        for count, (origin, read) in enumerate(chain.from_iterable(part.samples() for part in ranges), start=1):
            name = f"{number * spec.samples_per_shard + count - 1:09d}"
            try:
                yield _shard_sample(name, origin, read(), spec)
            except BadSample as fault:
                dropped.append((origin, str(fault)))

    tar = _tar(out, number)
    write_atomically(tar, lambda path: write_samples(path, samples()), _FIX)
    reasons = Counter(without_numbers(reason) for _, reason in dropped)
    stats = {"count": count, "successes": count - len(dropped), "status_dict": reasons, "dropped": dropped}
    write_text(_stats(tar), json_text(stats), _FIX)


def _shard_sample(name: str, origin: str, sample: Sample, spec: PrepareSpec) -> ShardSample:
    captions = [caption_text(caption) for caption in sample.captions]
    image = shard_image(sample.image, spec)
    (width, height), (original_width, original_height) = image.size, image.original
    meta = {
        "caption": captions[0],
        "captions": captions,
        "label": sample.label,
        "key": name,
        "source": escaped(origin),
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
    }
    return {
        "__key__": name,
        {b"\xff\xd8": "jpg", b"\x89P": "png"}.get(image.encoded[:2], "webp"): image.encoded,
        "json": json.dumps(meta).encode(),
        "txt": captions[0].encode(),
    }


def _tar(out: Path, number: int) -> Path:
    return out / f"{number:05d}.tar"


def _stats(tar: Path) -> Path:
    return tar.with_name(f"{tar.stem}_stats.json")


def prepare(spec: PrepareSpec) -> None:
    """Writes the missing shards to `spec.out`, then the reports of all shards.

    Raises ConfigError if `out` holds shards of another source or with other options, and DataError if every sample is
    dropped.
    """
    from clipx.report.console import stdout_console

    warn_of_few_cores("processes", spec.processes)
    raw = open_raw(spec)
    shards = raw.shards(spec.samples_per_shard)
    out, store = Path(spec.out).expanduser(), PartStore(spec.out, 0)
    with store.locked():
        others = [] if (out / _PLAN).exists() else sorted(out.glob("*.tar"))
        require(
            not others, f"out={out} holds shards that prepare did not write, e.g. {others[:1]}: give another folder"
        )
        plan = {"source": raw.fingerprint, "shards": len(shards), **_content_options(spec)}
        store.check_plan(_PLAN, plan, "shards")
        jobs = [(k, ranges) for k, ranges in enumerate(shards) if not _stats(_tar(out, k)).is_file()]
        done = len(shards) - len(jobs)
        console = stdout_console()
        if done:
            console.print(f"{done:,} of {len(shards):,} shards exist from an earlier run")
        import webdataset  # noqa: F401  # these are imported once, before the worker processes start

        from clipx.data import transform  # noqa: F401

        run_in_pool(partial(_write_shard, spec, out), jobs, f"writing {out}", processes=spec.processes)
        _report(spec, out, len(shards), raw.bad)


def _content_options(spec: PrepareSpec) -> dict[str, Any]:
    """Returns the options that the content of the shards depends on."""
    names = ("image_column", "caption_column", "label_column", "samples_per_shard", "resize")
    resizing = () if spec.resize is Resize.no else ("size", "only_shrink", "quality")
    found = {name: getattr(spec, name) for name in names} | {"max_pixels": MAX_PIXELS}
    return found | {name: getattr(spec, name) for name in resizing}


def _report(spec: PrepareSpec, out: Path, shards: int, unusable: Sequence[BadRecord]) -> None:
    """Writes and prints the reports of all shards.

    Writes dropped.jsonl (dropped samples with reasons), sizes.json (which open_clip reads), the indices and
    manifest.json. Raises DataError if every sample was dropped.
    """
    from clipx.data.shards.cache import Access
    from clipx.data.shards.index import caption_columns
    from clipx.data.shards.shard import Shard, index_shards
    from clipx.extra.prepare.index import IndexSpec, summary_table, write_manifest
    from clipx.report.console import stdout_console, text_table

    tars = [_tar(out, k) for k in range(shards)]
    stats = [json.loads(_stats(tar).read_text(encoding="utf-8")) for tar in tars]
    dropped = [
        *((bad.key, bad.reason) for bad in unusable),
        *((origin, reason) for stat in stats for origin, reason in stat["dropped"]),
    ]
    lines = [json_text({"sample": origin, "reason": reason}) + "\n" for origin, reason in dropped]
    write_text(out / "dropped.jsonl", "".join(lines), _FIX)
    sizes = {tar.name: stat["successes"] for tar, stat in zip(tars, stats, strict=True)}
    write_text(out / "sizes.json", json.dumps(sizes, indent=1) + "\n", _FIX)
    console = stdout_console()
    total = sum(sizes.values())
    reasons = Counter(without_numbers(reason) for _, reason in dropped)
    if dropped:
        title = f"dropped: {len(dropped):,} of {total + len(dropped):,}; listed in {out}/dropped.jsonl"
        rows = [(reason, f"{count:,}") for reason, count in reasons.most_common()]
        console.print(text_table(("reason", "samples"), rows, title, right=("samples",)))
    if not total:
        reason = f"; the first: {dropped[0][0]}: {dropped[0][1]}" if dropped else ""
        raise DataError(f"source={spec.source}: all {len(dropped):,} samples were dropped{reason}")
    name = tars[0].name if shards == 1 else f"{{{tars[0].stem}..{tars[-1].stem}}}.tar"
    label_key = None if spec.label_column is None else "json.label"
    about = IndexSpec(shards=f"{out}/{name}", caption_key="json.captions", label_key=label_key)
    columns = tuple(caption_columns(about.caption_keys))
    indexed = index_shards([Shard(str(tar), columns, Access()) for tar in tars])
    console.print(summary_table(about, indexed))
    write_manifest(about, out / "manifest.json", indexed)
    console.print(f"train on the shards: {_training_command(about)}")


def _training_command(about: IndexSpec) -> str:
    """Returns the command that trains on all captions, with the labels if there are some."""
    options = {"shards": about.shards, "caption_key": about.caption_key, "label_key": about.label_key}
    words = [f"data.{key}={shlex.quote(value)}" for key, value in options.items() if value is not None]
    return " ".join(["python -m clipx.train data=webdataset", *words])


main = cli(prepare, "prepare")

if __name__ == "__main__":  # worker processes import this module again
    main()
