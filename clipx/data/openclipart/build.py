"""Builds a data set of the captioned pictures in two Debian packages: `python -m clipx.data.openclipart out=FOLDER`.

out/pairs.csv      a line for each caption: filepath, caption, label (the top folder of the picture)
out/00000.tar …    the shards, with the other files of clipx.data.prepare
out/report.json    counts of pictures and captions, by reason
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipx.cli import cli
from clipx.data.image_format import OTHER_ENDINGS
from clipx.data.openclipart.captions import clean, says_more, shared
from clipx.data.openclipart.png_text import read_texts
from clipx.data.openclipart.spec import OpenclipartSpec
from clipx.data.prepare.prepare import prepare
from clipx.data.prepare.spec import PrepareSpec, Resize
from clipx.data.source import MAX_TEXT, BadSample, caption_text, read_bounded, without_numbers
from clipx.errors import ConfigError, DataError, require
from clipx.escape import json_text
from clipx.storage.local import write_atomically

SAMPLES_PER_SHARD = 1000
_FIX = "make room, or give another folder with out=…"
_TEXTS = ("Title", "Description")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: the path of its first file, its label, and its captions, cleaned."""

    path: str
    label: str
    captions: list[str]


@dataclass(slots=True)
class Scan:
    """Pictures by the digest of their file, and the counts of what was read and dropped."""

    pictures: dict[str, Picture] = field(default_factory=dict)
    files: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    dropped_pictures: Counter[str] = field(default_factory=Counter)
    dropped_captions: Counter[str] = field(default_factory=Counter)


# ---------------------------------------------------------------------------------------------------- pictures


def scan(folders: dict[str, Path]) -> Scan:
    """Reads the captions of all pictures, in the order of their paths. Files with the same bytes are one picture."""
    found = Scan()
    for source, folder in folders.items():
        for path in sorted(str(path) for path in folder.rglob("*") if path.is_file()):
            ending = os.path.splitext(path)[1].lower()  # noqa: PTH122
            if ending == ".png":
                found.files[source] += 1
                _scan_file(found, source, folder, path)
            elif ending in OTHER_ENDINGS:
                found.files[source] += 1
                found.dropped_pictures[f"image is a {ending} file, not PNG"] += 1
    return found


def _scan_file(found: Scan, source: str, folder: Path, path: str) -> None:
    """Adds a file to the pictures, or its captions to the picture with the same bytes."""
    try:
        encoded = read_bounded(path)
        texts = read_texts(encoded)
        if source == "openclipart":
            lines, author = [texts[key] for key in _TEXTS if key in texts], texts.get("Author", "")
        else:
            lines, author = _first_line(path), ""
        caption_text(path)  # raises BadSample if the path is not UTF-8, as pairs.csv is
    except BadSample as fault:
        found.dropped_pictures[str(fault)] += 1
        return
    label = Path(path).relative_to(folder).parts[0] if Path(path).parent != folder else source
    digest = hashlib.sha256(encoded).hexdigest()
    found.duplicates += digest in found.pictures
    picture = found.pictures.setdefault(digest, Picture(path, label, []))
    known = {caption.casefold() for caption in picture.captions}
    for line in lines:
        try:
            caption = clean(line, author)
        except BadSample as fault:
            found.dropped_captions[str(fault)] += 1
            continue
        if caption.casefold() not in known:
            known.add(caption.casefold())
            picture.captions.append(caption)


def _first_line(path: str) -> list[str]:
    """Returns the first line of NAME.txt, which is in English, as a list; an empty list without the file."""
    captions = f"{path[: -len('.png')]}.txt"
    if not os.access(captions, os.F_OK):
        return []
    return read_bounded(captions, "caption", MAX_TEXT).decode("utf-8-sig", "replace").splitlines()[:1]


def select(found: Scan, max_shared: int) -> list[Picture]:
    """Returns the pictures with a caption left, without the captions that are shared or repeat an earlier one."""
    common = shared([picture.captions for picture in found.pictures.values()], max_shared)
    selected = []
    for picture in found.pictures.values():
        captions: list[str] = []
        for caption in picture.captions:
            if caption.casefold() in common:
                found.dropped_captions[f"caption of more than {max_shared} pictures"] += 1
            elif captions and not says_more(caption, captions):
                found.dropped_captions["caption says no more than another one of the picture"] += 1
            else:
                captions.append(caption)
        if captions:
            selected.append(Picture(picture.path, picture.label, captions))
        else:
            found.dropped_pictures["no caption is left"] += 1
    return selected


# ----------------------------------------------------------------------------------------------------- command


def build(spec: OpenclipartSpec) -> None:
    """Writes pairs.csv, the missing shards and report.json.

    Raises ConfigError if a folder is missing or `out` holds pairs of other files or options, and DataError if no
    picture has a caption.
    """
    folders = spec.folders()
    found = scan(folders)
    pictures = select(found, spec.max_shared)
    if not pictures:
        raise DataError(f"no picture of {', '.join(map(str, folders.values()))} has a caption: check the folders")
    out = Path(spec.out).expanduser()
    table = out / "pairs.csv"
    _write_pairs(table, pictures)
    prepare(
        PrepareSpec(
            source=str(table),
            out=str(out),
            label_column="label",
            samples_per_shard=SAMPLES_PER_SHARD,
            resize=Resize.border,
            size=spec.size,
            only_shrink=False,
            processes=spec.processes,
        )
    )
    _write_report(out, spec, found, pictures)


def _write_pairs(table: Path, pictures: list[Picture]) -> None:
    """Writes a line for each caption. Raises ConfigError if the table exists with other content."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("filepath", "caption", "label"))
    writer.writerows((one.path, caption, one.label) for one in pictures for caption in one.captions)
    content = text.getvalue().encode()
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        before = table.read_bytes() if table.is_file() else None
    except OSError as error:
        raise ConfigError(f"out={table.parent} cannot be used ({error.strerror}): give a writable folder") from None
    require(
        before in (None, content),
        f"out={table.parent} holds pairs of other files or options: give another folder, or delete this one",
    )
    if before is None:
        write_atomically(table, lambda path: _write(path, content), _FIX)


def _write(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


def _write_report(out: Path, spec: OpenclipartSpec, found: Scan, pictures: list[Picture]) -> None:
    """Writes report.json, and prints the counts by reason."""
    from clipx.report.console import stdout_console, text_table

    with (out / "dropped.jsonl").open(encoding="utf-8") as file:
        undecodable = [json.loads(line) for line in file]
    by_reason = found.dropped_pictures + Counter(without_numbers(record["reason"]) for record in undecodable)
    lost = {record["sample"] for record in undecodable}
    usable = [picture for picture in pictures if picture.path not in lost]
    report: dict[str, Any] = {
        "files": dict(found.files),
        "duplicate_files": found.duplicates,
        "pictures": len(usable),
        "captions": sum(len(picture.captions) for picture in usable),
        "dropped_pictures": dict(by_reason.most_common()),
        "dropped_captions": dict(found.dropped_captions.most_common()),
        "labels": dict(sorted(Counter(picture.label for picture in usable).items())),
        "size": spec.size,
        "max_shared": spec.max_shared,
    }
    content = (json_text(report, indent=1) + "\n").encode()
    write_atomically(out / "report.json", lambda path: _write(path, content), _FIX)
    console = stdout_console()
    rows = [(reason, f"{count:,}") for reason, count in (by_reason + found.dropped_captions).most_common()]
    rows.append(("duplicate files", f"{found.duplicates:,}"))
    title = f"{report['pictures']:,} pictures with {report['captions']:,} captions; not used, as in {out}/report.json"
    console.print(text_table(("reason", "count"), rows, title, right=("count",)))
    console.print(f"train on the pictures: CLIPX_OPENCLIPART='{out}/*.tar' python -m clipx.train data=openclipart")


main = cli(build, "openclipart")
