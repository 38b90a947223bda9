"""Links and named pipes that another user put where clipx writes: they are refused or replaced, never followed."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT
from helpers.savers import SINGLE_RANK

from clipx.data.shards import cache
from clipx.distributed.parts import locked
from clipx.errors import ConfigError, DiskError
from clipx.extra.hf.row_groups import open_parquet_file
from clipx.storage.local import open_own, write_text
from clipx.storage.part_store import PartStore
from clipx.weights import download

CALLS = {
    "write_text",
    "write_bytes",
    "touch",
    "copyfile",
    "copy2",
    "copytree",
    "save_file",
}  # that open a path to write
NEW = "into a folder that this command has just made"
EXCEPT = {  # places that open a path in another way, and why
    "clipx/bench/gpu_parts/runs.py:resume": NEW,
    "clipx/bench/measure.py:_reset_high_water": "a file of the kernel",
    "clipx/bench/saving.py:_torch_save": NEW,
    "clipx/data/shared_memory.py:_reopened": "a descriptor of this process",
    "clipx/storage/local.py:open_own": "the one way",
    "clipx/weights/export.py:write_open_clip": NEW,
    "clipx/weights/export.py:_copy_tokenizer": NEW,
    "clipx/extra/hf_clip/writing.py:_write": NEW,
    "clipx/extra/wise_ft/interpolation.py:write_mixture": NEW,
    "clipx/weights/open_clip_checkpoint.py:write": NEW,
    "launch/clipx_launch/snapshot.py:_copy": NEW,
}


def opens_for_writing(call: ast.Call) -> bool:
    """Returns whether a call may open an existing path for writing. Mode x and O_EXCL never do."""
    text = ast.unparse(call)
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if text.startswith("os.open("):
        return bool(re.search("O_WRONLY|O_RDWR|O_CREAT", text)) and not re.search("O_EXCL|os.devnull", text)
    if name in ("open", "fdopen"):
        words = [*call.args, *(key.value for key in call.keywords if key.arg == "mode")]
        modes = [
            word.value
            for word in words
            if isinstance(word, ast.Constant) and re.fullmatch("[rwabt+]+", str(word.value))
        ]
        unknown = not method and len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)
        return unknown or bool(set("wa+") & set("".join(map(str, modes))))
    return (method and name in CALLS) or text.startswith("torch.save(")


def places(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yields each call with its place, FILE:FUNCTION."""

    def walk(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield f"{path.relative_to(ROOT)}:{inside}", child
            yield from walk(child, child.name if isinstance(child, ast.FunctionDef) else inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def test_files_are_opened_for_writing_in_one_way() -> None:
    """They are opened by `open_own` and `write_atomically`, or as new files, by mode x."""
    sources = [path for part in ("clipx", "launch") for path in sorted((ROOT / part).rglob("*.py"))]
    found = {place: ast.unparse(call) for path in sources for place, call in places(path) if opens_for_writing(call)}
    assert {place: text for place, text in found.items() if place not in EXCEPT} == {}
    assert EXCEPT.keys() <= found.keys(), "a place that no longer needs its exception"


def fetch_into(folder: Path) -> None:
    cache.store(SimpleNamespace(cache_path=folder / "a.tar"))  # type: ignore[arg-type]


def lock_parts(folder: Path) -> None:
    with locked(PartStore(str(folder), 0), SINGLE_RANK):
        pass


def lock_weights(folder: Path) -> None:
    with download._locked(folder):
        pass


def append(folder: Path) -> None:
    open_own(folder / ".lock", "ab").close()


@pytest.mark.parametrize(
    ("use", "error"), [(fetch_into, OSError), (lock_parts, ConfigError), (lock_weights, OSError), (append, OSError)]
)
def test_a_lock_in_a_shared_folder_leads_nowhere_and_does_not_block(
    tmp_path: Path, use: Callable[[Path], None], error: type[Exception]
) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    folder = tmp_path / "shared"
    folder.mkdir()
    for make in (lambda: (folder / ".lock").symlink_to(target), lambda: os.mkfifo(folder / ".lock")):
        make()
        with pytest.raises(error, match="it is a link|it is not a regular file"):
            use(folder)
        (folder / ".lock").unlink()
    assert target.read_text() == "before"


def test_a_named_pipe_in_the_place_of_a_part_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "embeddings.json")
    with pytest.raises(OSError, match="not a regular file"):
        PartStore(str(tmp_path), 0).read_text("embeddings.json")


def test_a_named_pipe_in_the_place_of_a_cached_footer_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "captions.parquet"
    pq.write_table(pa.table({"caption": ["a", "b"]}), path)
    cached = Path(open_parquet_file(str(path), 0).footer)
    cached.unlink()
    os.mkfifo(cached)
    assert open_parquet_file(str(path), 0).metadata().num_rows == 2
    assert cached.is_file()


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of its name is replaced, and what it leads to remains; after an error nothing else is in the folder."""
    target, path = tmp_path / "target", tmp_path / "folder" / "file"
    path.parent.mkdir()
    target.write_text("before")
    path.symlink_to(target)
    write_text(path, "first")
    assert (target.read_text(), path.read_text(), path.is_symlink()) == ("before", "first", False)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="file cannot be written .No space left on device.: make room"):
        write_text(path, "second")
    assert [(found.name, found.read_text()) for found in path.parent.iterdir()] == [("file", "first")]
