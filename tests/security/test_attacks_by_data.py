"""Malicious shards, tables and lists: they execute no code or shell, write no file, and exhaust no memory or time."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from helpers import SCRIPTS
from helpers.looks import composed, options_of, parsed, write_table
from helpers.payloads import Flag, jpeg, member, sample, write_tar
from helpers.runs import run
from helpers.samples import encode, picture

from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.data.csv import CsvSpec
from clipx.data.source import BadSample, Source
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ClipxError, DataError
from clipx.extra.look.command import look
from clipx.extra.prepare.command import PrepareSpec, prepare
from clipx.extra.prepare.index import IndexSpec, index
from clipx.run.directory import RunDir


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flag:
    """Changes to tmp_path, so that `touch flag` creates the flag too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    return Flag(tmp_path / "flag")


def shards(path: Path, **options: Any) -> Source:
    return WebDatasetSpec(name="x", shards=str(path), held_out_share=0.0, **options).open().train


def faults(source: Source) -> list[str]:
    """Returns the errors of all samples that cannot be read."""
    found = [bad.reason for bad in source.bad]
    for i in range(sum(source.sizes)):
        try:
            source.read(i)
        except BadSample as error:
            found.append(str(error))
    return found


# ------------------------------------------------------------------------------------------------------- members

_ENDINGS = ("pickle", "pkl", "pyd", "pth", "pt", "py", "npy", "npz", "ten", "mp", "cbor", "so", "seg.pickle", "jpg.pkl")


def malicious_tar(tmp_path: Path, flag: Flag) -> Path:
    contents = {"pth": flag.saved(), "pt": flag.saved(), "npy": flag.array()}
    contents["py"] = f"import os; os.system('touch {flag.path}')".encode()
    evil = [member(f"0.{ending}", contents.get(ending, flag.pickled())) for ending in _ENDINGS]
    return write_tar(tmp_path / "evil.tar", [*evil, *sample("0"), member("0.json", b"{}"), member("0.cls", b"1")])


def test_the_members_execute_in_webdatasets_decoder(flag: Flag, tmp_path: Path) -> None:
    path = str(malicious_tar(tmp_path, flag))
    assert flag.is_made_by(lambda: next(iter(webdataset.WebDataset(path, shardshuffle=False).decode("pil"))))


def test_members_that_could_execute_are_never_read(flag: Flag, tmp_path: Path) -> None:
    source = shards(malicious_tar(tmp_path, flag), label_key="cls")
    assert faults(source) == []
    assert source.read(0).captions == ["a caption"]
    assert source.read(0).label == 1
    assert flag.absent


_OUTSIDE = ("../../escaped", "../escaped", "{tmp}/escaped", "a/../../escaped", "..", "~/escaped", "$(touch flag)")


def test_member_names_are_never_used_as_paths(flag: Flag, tmp_path: Path) -> None:
    names = [name.format(tmp=tmp_path) for name in _OUTSIDE]
    path = tmp_path / "a" / "b" / "evil.tar"
    path.parent.mkdir(parents=True)
    write_tar(path, [one for name in names for one in sample(name)])
    source = shards(path)
    assert faults(source) == []
    assert {source.key(i) for i in range(sum(source.sizes))} <= {f"{path}:{name}.jpg" for name in names}
    left = {p.name for p in tmp_path.rglob("*") if p.is_file() and "cache" not in p.parts}
    assert left == {"evil.tar"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_ignored(flag: Flag, tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "secret.txt").write_text("of another")
    evil = [member("0.jpg", jpeg()), member("0.txt", kind=kind, link=f"{tmp_path}/secret.txt")]
    assert faults(shards(write_tar(tmp_path / "evil.tar", [*evil, *sample("1")]))) == ["caption is missing or empty"]


def test_a_compressed_tar_is_rejected_without_unpacking(flag: Flag, tmp_path: Path) -> None:
    plain = write_tar(tmp_path / "plain.tar", sample("0"))
    (tmp_path / "evil.tar").write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(DataError, match="cannot be read as an uncompressed tar"):
        shards(tmp_path / "evil.tar")


# --------------------------------------------------------------------------------------------------------- bombs


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script, folder = SCRIPTS / "bombs.py", tmp_path_factory.mktemp("bombs")
    found: dict[str, dict[str, Any]] = json.loads(run(sys.executable, str(script), str(folder)).stdout)
    return found


def test_decompression_bombs_are_rejected_by_their_headers(bombs: dict[str, dict[str, Any]]) -> None:
    """Takes at most 100 ms and 50 MB each."""
    assert len(bombs) > 20
    assert not [name for name, found in bombs.items() if found["said"] == "taken"]
    assert not [(name, found) for name, found in bombs.items() if found["seconds"] > 0.1]
    assert not [(name, found) for name, found in bombs.items() if found["mb"] > 50]


def test_decompression_bombs_are_rejected_with_the_reason(bombs: dict[str, dict[str, Any]]) -> None:
    reasons = {
        "a member of 1 GiB": "image is larger than 256 MiB",
        "a header of 1 GiB, no member": "is cut off inside 00.jpg",
        "a pax header of 1 GiB": "header of 1,073,741,824 bytes",
        "a large json": "json is larger than 16 MiB",
        "a PNG of 100 MP": "image has 10000x10000 pixels, more than data.max_pixels=89000000",
        "a JPEG of 100 MP, in training": "image has 10000x10000 pixels, more than data.max_pixels=89000000",
        "a JPEG of 400 MP": "image has 20000x20000 pixels, more than data.max_pixels=89000000",
        "a PNG with 100 MB of text": "Decompressed data too large",
        "json within json": "json cannot be read",
    }
    assert {name: bombs[name]["said"] for name, said in reasons.items() if said not in bombs[name]["said"]} == {}


# ----------------------------------------------------------------------------------------------- paths in tables


def malicious_paths(tmp_path: Path, url: str) -> list[str]:
    os.mkfifo(tmp_path / "pipe.jpg")
    return [
        *("../../../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd"),
        *("/dev/zero", "/dev/stdin", "pipe.jpg", "."),
        *("pipe:touch flag", "$(touch flag)", "`touch flag`", "|touch flag", "x.jpg;touch flag", "-flag"),
        *(f"{url}/x.jpg", f"simplecache::{url}/x.jpg", "s3://bucket/x.jpg", "~/x.jpg", "x" * 5000),
    ]


def test_paths_in_a_table_are_opened_only_as_regular_files(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "good.jpg").write_bytes(jpeg())
    with socket.create_server(("127.0.0.1", 0)) as server:
        paths = malicious_paths(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        path = tmp_path / "table.tsv"
        path.write_text("filepath\tcaption\n" + "".join(f"{name}\ta caption\n" for name in ["good.jpg", *paths]))
        source = CsvSpec(name="x", path=str(path), held_out_share=0.0).open().train
        assert faults(source).count("image cannot be read: not a regular file") == 3, "/dev/zero, /dev/stdin and a pipe"
        prepare(PrepareSpec(source=str(path), out="$(touch flag)", processes=1))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # no request has come
            server.accept()
    dropped = (tmp_path / "$(touch flag)" / "dropped.jsonl").read_text().splitlines()
    assert len(dropped) == len(paths)
    (packed,) = (tmp_path / "$(touch flag)").glob("*.tar")
    assert b"root:" not in packed.read_bytes()
    assert flag.absent


@pytest.mark.parametrize("column", ["filepath", "caption"])
def test_a_parquet_extension_type_is_not_unpickled(flag: Flag, tmp_path: Path, column: str) -> None:
    """CVE-2023-47248: pyarrow before 14.0.1 unpickled it when the file was opened."""
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": flag.pickled()}
    fields = [pa.field(n, pa.string(), metadata=metadata if n == column else None) for n in ("filepath", "caption")]
    (tmp_path / "good.jpg").write_bytes(jpeg())
    pq.write_table(pa.table([["good.jpg"], ["a caption"]], schema=pa.schema(fields)), tmp_path / "evil.parquet")
    schema = base64.b64decode(pq.read_metadata(tmp_path / "evil.parquet").metadata[b"ARROW:schema"])
    assert b"arrow.py_extension_type" in schema and flag.pickled() in schema
    source = CsvSpec(name="x", path="evil.parquet", held_out_share=0.0).open().train
    assert source.read(0).captions == ["a caption"]
    prepare(PrepareSpec(source="evil.parquet", out="shards", processes=1))
    assert flag.absent


# ------------------------------------------------------------------------------------------------- paths and URLs

COMMANDS = ("pipe:touch flag", "pipe:cat /etc/passwd", "pipe://touch flag")
CHAINS = (
    *("simplecache::file:///tmp/x.tar", "filecache::pipe:touch flag", "reference::file:///tmp/x.json"),
    *("zip://x.tar::file:///tmp/x.zip", "reference://x.tar", "python::os.system"),
)
SHELL = ("$(touch flag)", "`touch flag`", "x;touch flag", "x|touch flag", "x && touch flag", "-x\ntouch flag", "${IFS}")
PLACES = (*COMMANDS, *CHAINS, *SHELL)


def list_file(place: str) -> str:
    Path("list.txt").write_text(place + "\n")
    return "@list.txt"


ENTRANCES: dict[str, Callable[[str], object]] = {
    "data.shards": lambda place: WebDatasetSpec(name="x", shards=place).open(),
    "data.held_out_shards": lambda place: WebDatasetSpec(name="x", shards="good.tar", held_out_shards=place).open(),
    "a list": lambda place: WebDatasetSpec(name="x", shards=list_file(place)).open(),
    "the name of a list": lambda place: WebDatasetSpec(name="x", shards=f"@{place}").open(),
    "data.path": lambda place: CsvSpec(name="x", path=place).open(),
    "source": lambda place: prepare(PrepareSpec(source=place, out="shards", processes=1)),
    "shards": lambda place: index(IndexSpec(shards=place)),
    "resume": lambda place: RunDir(Path(str(Resume.parse(place).run_dir))).must_exist(),
    "checkpoint.remote": lambda place: CheckpointSpec(remote=place),
}


@pytest.mark.parametrize("key", ENTRANCES)
def test_no_path_is_passed_to_a_shell(flag: Flag, tmp_path: Path, key: str) -> None:
    write_tar(tmp_path / "good.tar", sample("0"))
    for place in PLACES:
        with pytest.raises(ClipxError) as raised:
            ENTRANCES[key](place)
        assert len(str(raised.value).splitlines()) <= 1 + place.count("\n"), place
        assert "root:" not in str(raised.value)
        assert flag.absent, place


def test_the_shell_payloads_execute_in_a_shell(flag: Flag) -> None:
    for words in ("$(touch flag)", "`touch flag`", "x;touch flag", "x|touch flag"):
        subprocess.run(["sh", "-c", f"echo {words}"], check=False, capture_output=True)
        assert not flag.absent, words
        flag.path.unlink()


def test_an_index_in_the_cache_is_never_unpickled(flag: Flag, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "good.tar", sample("0"))
    source = shards(path)
    (entry,) = (tmp_path / "cache" / "index").glob("*.npy")
    for content, message in ((flag.array(), "Python objects in dtype"), (flag.pickled(), "pickled")):
        entry.write_bytes(content)
        assert flag.is_made_by(lambda: np.load(entry, allow_pickle=True))
        with pytest.raises(Exception) as error:  # of any type if it was unpickled, which is asserted first
            source.read(0)
        assert flag.absent
        assert error.type is ValueError and message in str(error.value)


# ------------------------------------------------------------------------------------------------- captions, on pages

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</bdi></details></style></script><h1>broken out</h1>",
    "\u202egnp.exe\u202c and \u2066isolated",
    "bell \x07 escape \x1b[31m null-like \x9b",
    "<svg/onload=alert(1)> &lt;b&gt; &#60;b&#62;",
]


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    names = ["<b>a<b>.jpg", "\"onload='x'.jpg", "\u202egpj.jpg", "e\x1b[1m.jpg", "f&amp;.jpg", "g.jpg", "h.jpg"]
    images = {name: encode(picture(24, 24, 1), "JPEG") for name in names[:4]}
    images |= dict.fromkeys(names[4:], b"\x00")
    rows = [pair for caption in HOSTILE for pair in [(name, caption) for name in names]]
    table = write_table(tmp_path, images, rows)
    look(composed(*options_of(table, **{"data.name": "'<i>name'"})))
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    found = parsed(page)
    assert not found.handlers and found.tags["script"] == 1 and not {"b>a<b", "i", "h1>"} & set(found.tags)
    assert found.tags["h1"] == 1 and all(value.startswith("data:image/") for value in found.loaded)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\\u202egnp.exe" in page
    shown = set(page) - set("\n\u200c\u200d")
    assert all(character.isprintable() for character in shown)


def test_pickles_in_parquet_are_read_as_bytes(flag: Flag, tmp_path: Path) -> None:
    evil = pa.table({"filepath": [flag.pickled(), jpeg()], "caption": ["an object", "a caption"]})
    pq.write_table(evil, tmp_path / "evil.parquet")
    prepare(PrepareSpec(source="evil.parquet", out="shards", processes=1))
    assert len((tmp_path / "shards" / "dropped.jsonl").read_text().splitlines()) == 1
    assert flag.absent
