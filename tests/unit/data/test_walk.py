"""Folders with links and hidden files: the files of torchvision and timm, and an end where these have none."""

from __future__ import annotations

import glob
import os
import random
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.samples import jpeg
from timm.data.readers.reader_image_folder import find_images_and_targets
from torchvision.datasets.folder import ImageFolder

from clipx.data.folder import FolderSpec
from clipx.data.image_files import walk
from clipx.errors import ConfigError, DataError
from clipx.extra.coca.command import CaptionSpec


def tree(root: Path, rng: random.Random) -> Path:
    """Makes class folders with folders and files at any depth, and links from later folders to earlier ones."""
    folders = [root / name for name in ("cat", "dog", "eel")]
    for number in range(rng.randrange(3, 9)):
        folders.append(rng.choice(folders) / f"f{number}")
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("a.jpg", "b.PNG", "c.txt")[: 1 + rng.randrange(3)]:
            (folder / name).write_bytes(jpeg())
        target = root.with_name("elsewhere") / f"{number}" / "deep"
        target.mkdir(parents=True)
        (target / "linked.jpg").write_bytes(jpeg(number))
        if rng.random() < 0.5:
            (folder / "a_link").symlink_to(rng.choice((target, target.parent, Path(os.path.relpath(target, folder)))))
    (root / "fox").symlink_to(root.with_name("elsewhere") / "0")
    return root


@pytest.mark.parametrize("seed", range(6))
def test_images_and_labels_are_those_of_torchvision_and_timm(seed: int, tmp_path: Path) -> None:
    root = tree(tmp_path / "set", random.Random(seed))
    data = FolderSpec(name="own", path=str(root), held_out_share=0.0).open()
    ours = [(data.train.key(i), data.train.read(i).label) for i in range(sum(data.train.sizes))]
    theirs = ImageFolder(str(root))
    assert sorted(ours) == sorted(theirs.samples)
    assert data.classes is not None
    assert list(data.classes.names) == theirs.classes
    timm, _ = find_images_and_targets(str(root))
    assert sorted(file for file, _ in ours) == sorted(file for file, _ in timm), "timm's labels are the lowest folders"
    assert len(ours) > len([*root.rglob("*.jpg")]), "control: some images are in linked folders"
    assert not data.notes


def test_links_in_a_cycle_and_to_the_same_folder_are_entered_once(tmp_path: Path) -> None:
    (tmp_path / "set" / "a" / "b").mkdir(parents=True)
    for place in ("a/1.jpg", "a/b/2.jpg", ".hidden.jpg"):
        (tmp_path / "set" / place).write_bytes(b"x")
    for name, target in {
        "up": "..",
        "self": ".",
        "a/root": "/",
        "a/b/above": "../..",
        "a/again": "b",
        "z": "a/b",
    }.items():
        (tmp_path / "set" / name).symlink_to(target)
    (tmp_path / "set" / "gone").symlink_to("nothing")
    for hidden in (".cache", "__MACOSX", "@eaDir"):
        (tmp_path / "set" / hidden).mkdir()
        (tmp_path / "set" / hidden / "3.jpg").write_bytes(b"x")
    found = [os.path.relpath(file, tmp_path / "set") for file in walk(str(tmp_path / "set"), "source=set")]
    assert found == [".hidden.jpg", "gone", "a/1.jpg", "a/b/2.jpg"]
    (tmp_path / "link").symlink_to("set")
    assert len([*walk(str(tmp_path / "link"), "source=link")]) == 4, "the folder itself is a link"
    with pytest.raises(DataError, match=r"source=x: the folder \S+/none cannot be read \(No such file or directory\)"):
        list(walk(str(tmp_path / "none"), "source=x"))


def test_hidden_images_and_those_in_no_class_folder_are_noted(tmp_path: Path) -> None:
    for place in ("cat/1.jpg", "cat/._1.jpg", "dog/2.JPG", "dog/.DS_Store", "dog/3.gif", ".git/4.jpg", "__MACOSX/cat/._1.jpg", "5.png"):  # fmt: skip
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(jpeg())
    data = FolderSpec(name="own", path=str(tmp_path), held_out_share=0.0).open()
    assert [Path(data.train.key(i)).name for i in range(2)] == ["1.jpg", "2.JPG"]
    assert data.notes == [
        f"{tmp_path}: 1 images are not read, e.g. dog/3.gif: convert them to JPEG, PNG or WebP",
        f"{tmp_path}: 1 hidden images are not read, e.g. cat/._1.jpg: macOS writes ._ files; rename other images",
        f"{tmp_path}: 1 images are in no class folder and not read, e.g. 5.png",
    ]
    (tmp_path / "eel").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="the link eel leads to nothing: restore the folder, or remove the link"):
        FolderSpec(name="own", path=str(tmp_path)).open()


def test_images_to_caption_are_found_through_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "set", random.Random(2))
    (root / "cat" / "._a.jpg").write_bytes(b"x")
    (root / "cat" / "loop").symlink_to("..")

    def files(images: str) -> list[str]:
        return CaptionSpec(run="x", images=images, precision=cast(Any, None), distributed=cast(Any, None)).files()

    found = {pattern: files(f"{root}{pattern}") for pattern in ("", "/**/*.jpg", "/*/**", "/c**/**", "/cat/*.jpg")}
    (root / "cat" / "loop").unlink()
    (root / "cat" / "._a.jpg").unlink()
    expected = sorted(file for file, _ in ImageFolder(str(root)).samples)
    assert found[""] == expected
    assert found["/**/*.jpg"] == [file for file in expected if file.endswith(".jpg")]
    matched = glob.glob(f"{root}/*/**", recursive=True)  # noqa: PTH207
    assert found["/*/**"] == found["/c**/**"] + [
        file for file in sorted(matched) if Path(file).is_file() and "/cat/" not in file
    ]
    assert found["/cat/*.jpg"] == [f"{root}/cat/a.jpg"]
    assert "1 hidden images are not read" in capsys.readouterr().err
