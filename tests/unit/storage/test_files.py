"""Files at a path or a URL: local ones are read without fsspec, and as fsspec reads them."""

from __future__ import annotations

from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from clipx.errors import DataError
from clipx.storage.files import errors_as, file_info, is_local, local_path, read_file


def test_local_files_have_the_facts_and_the_content_that_fsspec_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts name the index of a shard in the cache: another time of a link would index its shard again."""
    (tmp_path / "a.tar").write_bytes(b"content")
    (tmp_path / "link.tar").symlink_to("a.tar")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    fs = fsspec.filesystem("file")
    for url in ("a.tar", str(tmp_path / "a.tar"), f"file://{tmp_path}/link.tar", "link.tar", "folder"):
        found = file_info(url, retry_s=0)
        assert is_local(url)
        assert found == {key: fs.info(local_path(url))[key] for key in found}, url
    assert [read_file(url, retry_s=0) for url in ("a.tar", f"file://{tmp_path}/link.tar")] == [b"content"] * 2


@pytest.mark.parametrize("read", [read_file, file_info])
def test_a_missing_local_file_is_named_with_its_whole_path(
    read: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert callable(read)
    place = rf"^list \(.*{tmp_path}/none'\): check it"
    with pytest.raises(DataError, match=place), errors_as(DataError, "list", "check it"):
        read("none", retry_s=0)
