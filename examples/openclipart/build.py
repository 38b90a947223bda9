"""`python examples/openclipart/build.py OUT`: builds a data set of the captioned pictures in two Debian packages.

OUT/pairs.csv      a line for each caption: filepath, caption, label (the top folder of the picture)
OUT/00000.tar …    the shards, with the other files of clipx.prepare
OUT/report.json    counts of pictures and captions, by reason

The same command continues a killed one.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import html
import io
import json
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from clipx.data.image_files import OTHER_ENDINGS
from clipx.data.source import MAX_TEXT, BadSample, caption_text, read_bounded, without_numbers
from clipx.errors import ClipxError, require
from clipx.escape import escaped, json_text
from clipx.extra.prepare.command import PrepareSpec, prepare
from clipx.extra.prepare.resize import Resize
from clipx.storage.local import write_atomically
from clipx.storage.url import check_path

Image.MAX_IMAGE_PIXELS = None  # only text chunks are read here, and prepare drops pictures with too many pixels

PACKAGES = {  # name: Debian package, its folder
    "openclipart": ("openclipart-png", "/usr/share/openclipart/png"),
    "tuxpaint": ("tuxpaint-stamps-default", "/usr/share/tuxpaint/stamps"),
}
_REMOVED = (
    re.compile(r"<!--.*?-->|<[^<>]*>", re.DOTALL),  # markup
    re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE),
    re.compile(r"\b(?:HASH|ARRAY)\(0x[0-9a-f]+\)"),  # a data structure that a Perl program printed as text
    re.compile(r"\.(?:svg|png)\b", re.IGNORECASE),
)
_MAIL = re.compile(r"[\w.+-]+\s?@\s?[\w-]+\.\w+")
_TOOL = re.compile(
    r"^(?:this work is (?:dedicated|hereby released|released)"
    r"|(?:created?|made|drawn) (?:with|in|using) (?:the )?\w+\W*$)",
    re.IGNORECASE,
)
_CREDIT = re.compile(r"^clip ?art by [^-]+ - ", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
Counts = defaultdict[str, Counter[str]]
"""Numbers of files and duplicates by source, of dropped_pictures and dropped_captions by reason."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: the path of its first file, its label, and its captions, cleaned."""

    path: str
    label: str
    captions: list[str]


def clean(text: str, author: str = "") -> str:
    """Returns the text of a caption as one line without markup, addresses, credits and control characters.

    Raises BadSample with the reason if no caption is left, or it is the name of the author.
    """
    text = html.unescape(text)
    with suppress(UnicodeError):  # the chunk tEXt is read as Latin-1, and the packages have UTF-8 in it
        text = text.encode("latin-1").decode("utf-8")
    for pattern in _REMOVED:
        text = pattern.sub(" ", text)
    text = "".join(" " if c == "_" or unicodedata.category(c)[0] in "CZ" else c for c in text)
    text = _CREDIT.sub("", " ".join(text.split())).strip()
    if _MAIL.search(text):
        raise BadSample("caption contains an e-mail address")
    if not any(map(str.isalpha, text)):
        raise BadSample("caption has no letter")
    if _TOOL.match(text) or text.casefold() == author.strip().casefold():
        raise BadSample("caption is a credit or a licence")
    return text


def says_more(caption: str, others: Sequence[str]) -> bool:
    """Returns whether the caption has a word, other than an article, that each of the other captions lacks."""
    words, *known = (set(_WORD.findall(text.casefold())) - {"a", "an", "the"} for text in (caption, *others))
    return all(words - other for other in known)


def scan(folders: dict[str, Path], counts: Counts) -> list[Picture]:
    """Reads the captions of all pictures, in the order of their paths. Files with the same bytes are one picture."""
    pictures: dict[str, Picture] = {}
    for source, folder in folders.items():
        for path in sorted(str(path) for path in folder.rglob("*") if path.is_file()):
            ending = os.path.splitext(path)[1].lower()  # noqa: PTH122
            if ending not in (".png", *OTHER_ENDINGS):
                continue
            counts["files"][source] += 1
            try:
                if ending != ".png":
                    raise BadSample(f"image is a {ending} file, not PNG")
                encoded = read_bounded(path)
                texts, author = _texts(encoded, path if source == "tuxpaint" else None)
                caption_text(path)  # raises BadSample if the path is not UTF-8, as pairs.csv is
            except BadSample as fault:
                counts["dropped_pictures"][str(fault)] += 1
                continue
            digest = hashlib.sha256(encoded).hexdigest()
            label = Path(path).relative_to(folder).parts[0] if Path(path).parent != folder else source
            counts["duplicates"][source] += digest in pictures
            _add(pictures.setdefault(digest, Picture(path, label, [])).captions, texts, author, counts)
    return list(pictures.values())


def _texts(encoded: bytes, path: str | None) -> tuple[list[str], str]:
    """Returns the captions, and the author, of the text chunks of a PNG file; of NAME.txt for the path of NAME.png.

    Raises BadSample if Pillow, which limits the sizes of texts, cannot read the chunks before the pixels.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=("PNG",)) as image:
            chunks = image.info
    except Exception:  # decoders raise undocumented exceptions on damaged input
        raise BadSample("image is not PNG, or its header is damaged") from None
    if path is None:
        return [chunks[key] for key in ("Title", "Description") if key in chunks], chunks.get("Author", "")
    table = f"{path[: -len('.png')]}.txt"
    if not os.access(table, os.F_OK):
        return [], ""
    text = read_bounded(table, "caption", MAX_TEXT).decode("utf-8-sig", "replace")
    return text.splitlines()[:1], ""  # the lines below have translations


def _add(captions: list[str], texts: Sequence[str], author: str, counts: Counts) -> None:
    """Adds the texts that are captions, cleaned, if they are new."""
    for text in texts:
        try:
            caption = clean(text, author)
        except BadSample as fault:
            counts["dropped_captions"][str(fault)] += 1
            continue
        if caption.casefold() not in map(str.casefold, captions):
            captions.append(caption)


def select(pictures: Sequence[Picture], max_shared: int, counts: Counts) -> list[Picture]:
    """Removes captions that are shared or repeat an earlier one. Returns the pictures with a caption left."""
    uses = Counter(caption.casefold() for picture in pictures for caption in picture.captions)
    dropped = counts["dropped_captions"]
    for picture in pictures:
        kept: list[str] = []
        for caption in picture.captions:
            if uses[caption.casefold()] > max_shared:
                dropped[f"caption of more than {max_shared} pictures"] += 1
            elif kept and not says_more(caption, kept):
                dropped["caption says no more than another one of the picture"] += 1
            else:
                kept.append(caption)
        picture.captions[:] = kept
    left = [picture for picture in pictures if picture.captions]
    counts["dropped_pictures"]["no caption is left"] += len(pictures) - len(left)
    return left


def build(out: Path, folders: dict[str, Path], size: int = 64, max_shared: int = 3, processes: int = 0) -> None:
    """Writes pairs.csv, the missing shards and report.json. Raises ClipxError, also if no picture has a caption."""
    require(max_shared >= 1, f"--max-shared {max_shared} must be at least 1 picture")
    require(bool(folders), "no picture is left: give the folder of --openclipart or of --tuxpaint")
    for name, folder in folders.items():
        fix = f"apt-get install {PACKAGES[name][0]}, or leave it out by --{name} none"
        require(folder.is_dir(), f"--{name} {folder} is no folder: {fix}")
    table = out / "pairs.csv"
    spec = PrepareSpec(source=str(table), out=str(out), size=size, processes=processes, resize=Resize.border)
    spec = replace(spec, label_column="label", samples_per_shard=1000, only_shrink=False)
    counts = Counts(Counter)
    pictures = select(scan(folders, counts), max_shared, counts)
    require(bool(pictures), f"no picture of {', '.join(map(str, folders.values()))} has a caption: check the folders")
    text = io.StringIO(newline="")
    rows = [(one.path, caption, one.label) for one in pictures for caption in one.captions]
    csv.writer(text, lineterminator="\n").writerows([("filepath", "caption", "label"), *rows])
    same = not table.is_file() or table.read_bytes() == text.getvalue().encode()
    require(same, f"{out} holds pairs of other files or options: give another folder, or delete this one")
    out.mkdir(parents=True, exist_ok=True)
    _write(table, text.getvalue())
    prepare(spec)
    report = {**_report(out, pictures, counts), "size": size, "max_shared": max_shared}
    _write(out / "report.json", json_text(report, indent=1) + "\n")
    print(escaped(f"{report['pictures']:,} pictures, {report['captions']:,} captions; not used: see {out}/report.json"))
    print(escaped(f"CLIPX_OPENCLIPART='{out}/*.tar' python -m clipx.train --config-dir examples/conf data=openclipart"))


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda other: Path(other).write_bytes(text.encode()), "make room, or give another folder")


def _report(out: Path, pictures: Sequence[Picture], counts: Counts) -> dict[str, Any]:
    """Returns the counts by reason, with the pictures that prepare dropped."""
    undecodable = [json.loads(line) for line in (out / "dropped.jsonl").read_bytes().splitlines()]
    dropped = counts["dropped_pictures"] + Counter(without_numbers(record["reason"]) for record in undecodable)
    lost = {record["sample"] for record in undecodable}
    usable = [picture for picture in pictures if picture.path not in lost]
    return {
        "files": dict(counts["files"]),
        "duplicate_files": counts["duplicates"].total(),
        "pictures": len(usable),
        "captions": sum(len(picture.captions) for picture in usable),
        "dropped_pictures": dict(dropped.most_common()),
        "dropped_captions": dict(counts["dropped_captions"].most_common()),
        "labels": dict(sorted(Counter(picture.label for picture in usable).items())),
    }


def main() -> None:
    """Parses the command line and builds the data set. An error is one line and exit code 2."""
    parser = argparse.ArgumentParser(description="Builds a data set of the captioned pictures in two Debian packages.")
    parser.add_argument("out", metavar="OUT", help="folder for pairs.csv, the shards and report.json")
    for name, (package, default) in PACKAGES.items():
        about = f"folder of the Debian package {package}, none without it (default: {default})"
        parser.add_argument(f"--{name}", default=default, metavar="FOLDER|none", help=about)
    parser.add_argument("--size", type=int, default=64, help="sides of the pictures, in pixels (default: 64)")
    parser.add_argument("--max-shared", type=int, default=3, help="most pictures with the same caption (default: 3)")
    parser.add_argument("--processes", type=int, default=0, help="worker processes, 0 for one per core (default: 0)")
    given = parser.parse_args()
    named = {name: getattr(given, name) for name in PACKAGES if getattr(given, name) != "none"}
    folders = {name: Path(folder).expanduser().absolute() for name, folder in named.items()}
    try:
        for key, path in {"OUT": given.out, **named}.items():
            check_path(key, path)
        build(Path(given.out).expanduser(), folders, given.size, given.max_shared, given.processes)
    except (ClipxError, OSError) as error:
        parser.exit(2, f"error: {escaped(str(error))}\n")


if __name__ == "__main__":  # worker processes import this module again
    main()
