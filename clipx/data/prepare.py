"""`python -m clipx.data.prepare source=… out=…`: images and captions as one has them -> WebDataset shards.

The layout is img2dataset's: 00000.tar with 000000000.jpg, .json, .txt, and 00000_stats.json beside it. A shard is
written under another name and renamed when it is whole, its stats after it; so a kill leaves whole shards only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.data import PILLOW_LIMIT
from clipx.data.csv import Columns, is_separator
from clipx.data.index import RETRY_S
from clipx.data.raw import Piece, Reading, open_raw
from clipx.data.resize import Resize, shard_image
from clipx.data.source import Bad, BadSample, Sample, alike, caption_text
from clipx.data.write import in_pool, write_members
from clipx.errors import ConfigError, DataError, require
from clipx.storage.local import take, write_whole
from clipx.storage.url import check_path

_FIX = "make room, or give another folder with out=…"


@option("")
@dataclass(kw_only=True, slots=True)
class PrepareSpec:
    kind: str = "prepare"
    # table (CSV, TSV, Parquet) of paths and captions; Parquet with the images inside, also by URL; folder of name.jpg
    # and name.txt, or of tables; several by pattern, @list.txt or ::, as data.shards
    source: str = MISSING
    out: str = MISSING  # the folder of the shards
    image_column: str = (
        "filepath"  # of a table; of Parquet also one of bytes, or of {bytes, path} as Hugging Face has it
    )
    caption_column: str = "caption"
    label_column: str | None = None  # an index or a class name, kept in the json member
    separator: str | None = None  # as data.separator
    samples_per_shard: int = 10_000
    resize: Resize = Resize.no
    size: int = 256  # pixels
    only_shrink: bool = True  # images that are smaller stay as they are
    quality: int = 95  # of the JPEG that a resized image becomes
    max_pixels: int = 89_000_000  # as data.max_pixels
    processes: int = 0  # 0: as many as there are cores
    retry_s: float = RETRY_S  # as data.retry_s

    def __post_init__(self) -> None:
        require(self.samples_per_shard >= 1, f"samples_per_shard={self.samples_per_shard} must be at least 1")
        require(self.size >= 1, f"size={self.size} must be at least 1 pixel")
        require(1 <= self.quality <= 100, f"quality={self.quality} must lie in [1, 100]: 95 is usual")
        require(1 <= self.max_pixels <= PILLOW_LIMIT, f"max_pixels={self.max_pixels} must lie in [1, {PILLOW_LIMIT}]")
        check_path("out", self.out)
        resizing = (self.size, self.only_shrink, self.quality)
        require(
            self.resize is not Resize.no or resizing == (256, True, 95),
            f"size={self.size}, only_shrink={self.only_shrink} and quality={self.quality} say how to resize, and "
            "resize=no keeps images as they are: choose resize=keep_ratio, or leave them out",
        )
        require(self.retry_s >= 0, f"retry_s={self.retry_s} is negative: give 0, to try once, or more seconds")
        require(self.processes >= 0, f"processes={self.processes} is negative: give 0, for all cores, or more")
        require(
            self.separator is None or is_separator(self.separator),
            f"separator={self.separator!r} must be one character, or comma, semicolon, tab or pipe",
        )

    @property
    def columns(self) -> Columns:
        return self.image_column, self.caption_column, self.label_column


# ------------------------------------------------------------------------------------------------------ shards


def _write_shard(spec: PrepareSpec, out: Path, job: tuple[int, Sequence[Piece]]) -> None:
    """Sample i of the source has the key i, whatever was dropped before it."""
    number, pieces = job
    dropped: list[tuple[str, str]] = []
    reasons: Counter[str] = Counter()
    count = 0

    def members() -> Iterator[tuple[str, bytes]]:
        nonlocal count
        found_in_all = chain.from_iterable(piece.samples() for piece in pieces)
        for count, (origin, found) in enumerate(found_in_all, start=1):
            name = f"{number * spec.samples_per_shard + count - 1:09d}"
            try:
                if isinstance(found, BadSample):
                    raise found
                yield from _members(name, origin, found, spec)
            except BadSample as fault:
                dropped.append((origin, str(fault)))
                reasons[alike(str(fault))] += 1

    tar = _tar(out, number)
    write_whole(tar, lambda path: write_members(path, members()), _FIX)
    stats = {"count": count, "successes": count - len(dropped), "status_dict": reasons, "dropped": dropped}
    write_whole(_stats(tar), lambda path: Path(path).write_text(json.dumps(stats)), _FIX)


def _members(name: str, origin: str, sample: Sample, spec: PrepareSpec) -> list[tuple[str, bytes]]:
    captions = [caption_text(caption) for caption in sample.captions]
    image = shard_image(sample.image, spec)
    (width, height), (original_width, original_height) = image.size, image.original
    meta = {
        "caption": captions[0],
        "captions": captions,
        "label": sample.label,
        "key": name,
        "source": origin.encode("utf-8", "replace").decode(),
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
    }
    return [
        (f"{name}.{_ending(image.encoded)}", image.encoded),
        (f"{name}.json", json.dumps(meta).encode()),
        (f"{name}.txt", captions[0].encode()),
    ]


def _ending(encoded: bytes) -> str:
    return {b"\xff\xd8": "jpg", b"\x89P": "png"}.get(encoded[:2], "webp")


def _tar(out: Path, number: int) -> Path:
    return out / f"{number:05d}.tar"


def _stats(tar: Path) -> Path:
    return tar.with_name(f"{tar.stem}_stats.json")


# ----------------------------------------------------------------------------------------------------- the whole


def prepare(spec: PrepareSpec) -> None:
    """Raises ConfigError where `out` holds shards of another source or of other options."""
    from clipx.report.console import terminal

    raw = open_raw(spec.source, Reading(spec.columns, spec.separator, spec.retry_s))
    shards = raw.shards(spec.samples_per_shard)
    out = Path(spec.out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"out={out} cannot be made ({error.strerror}): give a folder that you can write") from None
    with lock:
        take(lock, f"out={out}")
        _check_plan(spec, out, {"source": raw.fingerprint, "shards": len(shards), **_choices(spec)})
        for left in out.glob(".[0-9]*.*"):  # of a killed run
            left.unlink()
        jobs = [(k, pieces) for k, pieces in enumerate(shards) if not _stats(_tar(out, k)).is_file()]
        done = len(shards) - len(jobs)
        console = terminal()
        if done:
            console.print(f"{done:,} of {len(shards):,} shards are there from an earlier run")
        from clipx.data import transform  # noqa: F401  # once, before processes are made

        in_pool(partial(_write_shard, spec, out), jobs, f"writing {out}", processes=spec.processes)
        _report(spec, out, len(shards), raw.bad)


def _choices(spec: PrepareSpec) -> dict[str, Any]:
    """What the shards' contents depend on."""
    names = ("image_column", "caption_column", "label_column", "samples_per_shard", "resize", "max_pixels")
    resizing = () if spec.resize is Resize.no else ("size", "only_shrink", "quality")
    return {name: getattr(spec, name) for name in (*names, *resizing)}


def _check_plan(spec: PrepareSpec, out: Path, plan: dict[str, Any]) -> None:
    path = out / "prepare.json"
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [key for key in {**before, **plan} if before.get(key) != plan.get(key)]
        differences = ", ".join(f"{key} was {before.get(key)}, is {plan.get(key)}" for key in changed)
        require(
            not changed,
            f"out={out} holds shards made otherwise ({differences}): give another folder, or delete that one",
        )
        return
    there = sorted(out.glob("*.tar"))
    require(not there, f"out={out} holds shards that are not of this command, e.g. {there[:1]}: give another folder")
    write_whole(path, lambda other: Path(other).write_text(json.dumps(plan, indent=1) + "\n"), _FIX)


def _report(spec: PrepareSpec, out: Path, shards: int, unusable: Sequence[Bad]) -> None:
    """What was dropped and why, sizes.json as open_clip reads it, the index and its manifest."""
    from rich.table import Table as RichTable

    from clipx.data.index import IndexSpec, index_shards, overview, write_manifest
    from clipx.data.tar import TXT
    from clipx.report.console import terminal

    tars = [_tar(out, k) for k in range(shards)]
    stats = [json.loads(_stats(tar).read_text()) for tar in tars]
    dropped = [
        *((bad.key, bad.reason) for bad in unusable),
        *((origin, reason) for stat in stats for origin, reason in stat["dropped"]),
    ]
    lines = [json.dumps({"sample": origin, "reason": reason}) + "\n" for origin, reason in dropped]
    write_whole(out / "dropped.jsonl", lambda path: Path(path).write_text("".join(lines)), _FIX)
    sizes = {tar.name: stat["successes"] for tar, stat in zip(tars, stats, strict=True)}
    write_whole(out / "sizes.json", lambda path: Path(path).write_text(json.dumps(sizes, indent=1) + "\n"), _FIX)
    console = terminal()
    total = sum(sizes.values())
    reasons = Counter(alike(reason) for _, reason in dropped)
    table = RichTable(title=f"dropped: {len(dropped):,} of {total + len(dropped):,}; named in {out}/dropped.jsonl")
    table.add_column("reason")
    table.add_column("samples", justify="right")
    for reason, count in reasons.most_common():
        table.add_row(reason, f"{count:,}")
    if dropped:
        console.print(table)
    if not total:
        reason = f", the first because {dropped[0][1]}: {dropped[0][0]}" if dropped else ""
        raise DataError(f"source={spec.source}: all {len(dropped):,} samples were dropped{reason}")
    pattern = f"{out}/{tars[0].name}" if shards == 1 else f"'{out}/{{{tars[0].stem}..{tars[-1].stem}}}.tar'"
    about, urls = IndexSpec(shards=pattern, held_out_share=0.0), [str(tar) for tar in tars]
    indices = index_shards(urls, TXT)
    console.print(overview(about, indices))
    write_manifest(about, out / "manifest.json", urls, indices)
    console.print(f"train on it with: python -m clipx.train data=webdataset data.shards={pattern}", markup=False)


main = cli(prepare, "prepare")

if __name__ == "__main__":
    # The functions that processes call are then found under their own name, in the module that others import.
    import clipx.data.prepare

    clipx.data.prepare.main()
