"""`python -m clipx.data.prepare source=… out=…`: images and captions as one has them -> WebDataset shards.

The layout is img2dataset's: 00000.tar with 000000000.jpg, .json, .txt, and 00000_stats.json beside it. A shard is
written under another name and renamed when it is whole, its stats after it; so a kill leaves whole shards only.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.config import MISSING, cli, option
from clipx.data import PILLOW_LIMIT
from clipx.data.csv import Columns, Table, check_columns, is_separator
from clipx.data.source import MAX_BYTES, BadSample, Sample, alike, caption_text, parse_label
from clipx.data.write import in_pool, write_members, write_whole
from clipx.errors import ConfigError, DataError, require

if TYPE_CHECKING:
    from PIL.Image import Image

_FIX = "make room, or give another folder with out=…"
_IMAGES = (".jpg", ".jpeg", ".png", ".webp")


class Resize(StrEnum):
    """img2dataset's resize_mode."""

    no = "no"  # images are kept as they are, byte for byte
    border = "border"  # the longer side becomes `size`, and white makes it a square
    keep_ratio = "keep_ratio"  # the shorter side becomes `size`
    keep_ratio_largest = "keep_ratio_largest"  # the longer side becomes `size`
    center_crop = "center_crop"  # the shorter side becomes `size`, and the middle is cut out as a square


@option("")
@dataclass(kw_only=True, slots=True)
class PrepareSpec:
    kind: str = "prepare"
    # table (CSV, TSV, Parquet) of paths and captions; Parquet with the images inside; folder of name.jpg and name.txt
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

    def __post_init__(self) -> None:
        require(self.samples_per_shard >= 1, f"samples_per_shard={self.samples_per_shard} must be at least 1")
        require(self.size >= 1, f"size={self.size} must be at least 1 pixel")
        require(1 <= self.quality <= 100, f"quality={self.quality} must lie in [1, 100]: 95 is usual")
        require(1 <= self.max_pixels <= PILLOW_LIMIT, f"max_pixels={self.max_pixels} must lie in [1, {PILLOW_LIMIT}]")
        resizing = (self.size, self.only_shrink, self.quality)
        require(
            self.resize is not Resize.no or resizing == (256, True, 95),
            f"size={self.size}, only_shrink={self.only_shrink} and quality={self.quality} say how to resize, and "
            "resize=no keeps images as they are: choose resize=keep_ratio, or leave them out",
        )
        require(self.processes >= 0, f"processes={self.processes} is negative: give 0, for all cores, or more")
        require(
            self.separator is None or is_separator(self.separator),
            f"separator={self.separator!r} must be one character, or comma, semicolon, tab or pipe",
        )

    @property
    def columns(self) -> Columns:
        return self.image_column, self.caption_column, self.label_column


# ----------------------------------------------------------------------------------------------------- sources


class Part:
    """What becomes one shard. Goes to another process, so it is small and opens its files there."""

    def samples(self) -> Iterator[tuple[str, Sample | BadSample]]:
        """Each with where it comes from."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Rows(Part):
    """Rows of a table of paths."""

    table: Table

    def samples(self) -> Iterator[tuple[str, Sample | BadSample]]:
        for index in range(len(self.table.images)):
            try:
                yield self.table.key(index), self.table.read(index)
            except BadSample as fault:
                yield self.table.key(index), fault


@dataclass(frozen=True, slots=True)
class Files(Part):
    """Images with their captions beside them; a line of the text is a caption."""

    images: Sequence[str]

    def samples(self) -> Iterator[tuple[str, Sample | BadSample]]:
        for image in self.images:
            try:
                yield (
                    image,
                    Sample(_bounded(image, "image"), _lines(_bounded(f"{image.rpartition('.')[0]}.txt", "caption"))),
                )
            except BadSample as fault:
                yield image, fault


def _bounded(path: str, what: str) -> bytes:
    try:
        if os.path.getsize(path) > MAX_BYTES:  # noqa: PTH202
            raise BadSample(f"{what} is larger than {MAX_BYTES >> 20} MiB")
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise BadSample(f"{what} is missing") from None
    except OSError as error:
        raise BadSample(f"{what} cannot be read: {error.strerror}") from None


def _lines(encoded: bytes) -> list[str]:
    return [line.strip() for line in caption_text(encoded).splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class Records(Part):
    """Rows of a Parquet file with images inside: from `start` on, `count` of them."""

    path: str
    start: int
    count: int
    columns: Columns

    def samples(self) -> Iterator[tuple[str, Sample | BadSample]]:
        for number, cells in enumerate(self._cells(), start=self.start):
            key = f"{self.path}:{number + 1}"
            try:
                yield key, self._sample(cells)
            except BadSample as fault:
                yield key, fault

    def _cells(self) -> Iterator[dict[str, Any]]:
        """Only the row groups that hold the rows are read, a few rows at a time."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            starts = [sum(sizes[:k]) for k in range(len(sizes))]
            stop = self.start + self.count
            groups = [k for k, size in enumerate(sizes) if starts[k] < stop and starts[k] + size > self.start]
            row = starts[groups[0]] if groups else 0
            wanted = [name for name in self.columns if name is not None]
            for batch in file.iter_batches(batch_size=64, row_groups=groups, columns=wanted):
                first, row = row, row + len(batch)
                here = batch.slice(max(0, self.start - first), max(0, min(row, stop) - max(first, self.start)))
                yield from here.to_pylist()

    def _sample(self, cells: dict[str, Any]) -> Sample:
        image, captions = cells[self.columns[0]], cells[self.columns[1]]
        image = image.get("bytes") if isinstance(image, dict) else image
        if not image:
            raise BadSample("image is missing")
        texts = [text for text in (captions if isinstance(captions, list) else [captions]) if text]
        if not texts:
            raise BadSample("caption is missing")
        label = None if self.columns[2] is None else cells[self.columns[2]]
        if self.columns[2] is not None:
            label = parse_label("" if label is None else str(label))
        return Sample(image, [caption_text(text) for text in texts], label)


def _parts(spec: PrepareSpec) -> tuple[list[Part], list[tuple[str, str]], str]:
    """What becomes shards, what is unusable from the start, and what tells this source from others."""
    import hashlib

    source, per_shard = Path(spec.source).expanduser(), spec.samples_per_shard
    if source.is_dir():
        files = sorted(str(p) for p in source.rglob("*") if p.suffix.lower() in _IMAGES and p.is_file())
        require(bool(files), f"source={source} holds no {', '.join(_IMAGES)}: give a folder of images with captions")
        digest = hashlib.sha256("\n".join(files).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return [Files(files[k : k + per_shard]) for k in range(0, len(files), per_shard)], [], digest
    if (rows := _records(spec, source)) is not None:
        stat = source.stat()
        starts = range(0, rows, per_shard)
        parts = [Records(str(source), k, min(per_shard, rows - k), spec.columns) for k in starts]
        return list(parts), [], f"{stat.st_size} {stat.st_mtime_ns}"
    table = Table.open(spec.source, "source", spec.separator, spec.columns)
    slices = (slice(k, k + per_shard) for k in range(0, len(table.images), per_shard))
    parts_of_table: list[Part] = [Rows(table.part(piece)) for piece in slices]
    return parts_of_table, [(bad.key, bad.reason) for bad in table.bad], table.fingerprint


def _records(spec: PrepareSpec, source: Path) -> int | None:
    """The number of rows of a Parquet file that has images inside; None of other files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not source.is_file():
        raise ConfigError(f"source={source} is neither a file nor a folder: check the path")
    with source.open("rb") as file:
        if file.read(4) != b"PAR1":
            return None
    try:
        parquet = pq.ParquetFile(source)
    except pa.ArrowException as error:
        raise DataError(f"source={source} cannot be read as Parquet ({' '.join(str(error).split())[:200]})") from None
    schema = parquet.schema_arrow
    check_columns(source, schema.names, columns=spec.columns, group="")
    kind = schema.field(spec.image_column).type
    inside = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind)
    return parquet.metadata.num_rows if inside else None


# ------------------------------------------------------------------------------------------------------ shards


def _write_shard(spec: PrepareSpec, out: Path, job: tuple[int, Part]) -> None:
    """Sample i of the source has the key i, whatever was dropped before it."""
    number, part = job
    dropped: list[tuple[str, str]] = []
    reasons: Counter[str] = Counter()
    count = 0

    def members() -> Iterator[tuple[str, bytes]]:
        nonlocal count
        for count, (origin, found) in enumerate(part.samples(), start=1):
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
    from clipx.data.transform import decode

    captions = [caption_text(caption) for caption in sample.captions]
    image = decode(sample.image, spec.max_pixels)
    resized = resize(image, spec)
    encoded = sample.image if resized is None else _jpeg(resized, spec.quality)
    (width, height), (original_width, original_height) = (resized or image).size, image.size
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
        (f"{name}.{_ending(encoded)}", encoded),
        (f"{name}.json", json.dumps(meta).encode()),
        (f"{name}.txt", captions[0].encode()),
    ]


def resize(image: Image, spec: PrepareSpec) -> Image | None:
    """As img2dataset's Resizer; None where the image stays as it is."""
    from PIL import Image as Pillow

    if spec.resize is Resize.no:
        return None
    longest = spec.resize in (Resize.border, Resize.keep_ratio_largest)
    side = (max if longest else min)(image.size)
    if spec.only_shrink and side <= spec.size:
        return None
    width, height = (max(1, round(length * spec.size / side)) for length in image.size)
    resized = image.resize((width, height), Pillow.Resampling.LANCZOS)
    if spec.resize in (Resize.keep_ratio, Resize.keep_ratio_largest):
        return resized
    square = Pillow.new("RGB", (spec.size, spec.size), "white")
    square.paste(resized, ((spec.size - width) // 2, (spec.size - height) // 2))
    return square


def _jpeg(image: Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _ending(encoded: bytes) -> str:
    return {b"\xff\xd8": "jpg", b"\x89P": "png"}.get(encoded[:2], "webp")


def _tar(out: Path, number: int) -> Path:
    return out / f"{number:05d}.tar"


def _stats(tar: Path) -> Path:
    return tar.with_name(f"{tar.stem}_stats.json")


# ----------------------------------------------------------------------------------------------------- the whole


def prepare(spec: PrepareSpec) -> None:
    """Raises ConfigError where `out` holds shards of another source or of other options."""
    from clipx.console import terminal

    parts, unusable, source = _parts(spec)
    out = Path(spec.out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"out={out} cannot be made ({error.strerror}): give a folder that you can write") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"out={out} is being written by another process: wait for it, or give another folder"
            ) from None
        _check_plan(spec, out, {"source": source, "shards": len(parts), **_choices(spec)})
        for left in out.glob(".[0-9]*.*"):  # of a killed run
            left.unlink()
        jobs = [(k, part) for k, part in enumerate(parts) if not _stats(_tar(out, k)).is_file()]
        done = len(parts) - len(jobs)
        console = terminal()
        if done:
            console.print(f"{done:,} of {len(parts):,} shards are there from an earlier run")
        from clipx.data import transform  # noqa: F401  # once, before processes are made

        in_pool(partial(_write_shard, spec, out), jobs, f"writing {out}", processes=spec.processes)
        _report(spec, out, len(parts), unusable)


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


def _report(spec: PrepareSpec, out: Path, shards: int, unusable: Sequence[tuple[str, str]]) -> None:
    """What was dropped and why, sizes.json as open_clip reads it, the index and its manifest."""
    from rich.table import Table as RichTable

    from clipx.console import terminal
    from clipx.data.index import TXT, IndexSpec, index_shards, overview, write_manifest

    tars = [_tar(out, k) for k in range(shards)]
    stats = [json.loads(_stats(tar).read_text()) for tar in tars]
    dropped = [*unusable, *((origin, reason) for stat in stats for origin, reason in stat["dropped"])]
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
