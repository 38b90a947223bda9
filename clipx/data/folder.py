"""A folder of class folders, path/CLASS/*.jpg: labelled images, whose captions are templates with the class's name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipx.config.registry import option
from clipx.data.class_names import fill, read_names, read_templates
from clipx.data.shards.packed import Packed
from clipx.data.source import ImageFiles, Sample, check_held_out_share, read_bounded, split
from clipx.data.spec import Classes, Dataset, DataSpec, all_held_out
from clipx.errors import ConfigError, DataError, require

IMAGES = (".jpg", ".jpeg", ".png", ".webp")


@option("data")
@dataclass(kw_only=True, slots=True)
class FolderSpec(DataSpec):
    """Label i is the i-th class folder by name."""

    kind: str = "folder"
    path: str | None = None  # the folder of class folders
    held_out_path: str | None = None  # likewise, to evaluate on; its classes are among those of path
    held_out_share: float = 0.05  # share of the images held out where held_out_path is not given; 0 for none
    classnames: str | None = None  # imagenet, or a file with one name a line by the order of the folders; null: theirs
    templates: str | None = None  # openai_imagenet, simple, or a file with one a line, {} standing for the name

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_held_out_share(self.held_out_share)

    def open(self) -> Dataset:
        if self.path is None:
            raise ConfigError("data.path has no value: give a folder of class folders, e.g. data.path=/data/train")
        folders = class_folders(self.path, "data.path")
        classes = self._classes(folders)
        train = ImageFolder.open(self.path, "data.path", folders, classes)
        if self.held_out_path is None:
            return Dataset(*split(train, self.held_out_share), classes)
        self._check_known(class_folders(self.held_out_path, "data.held_out_path"), folders)
        return Dataset(train, ImageFolder.open(self.held_out_path, "data.held_out_path", folders, classes), classes)

    def open_for_evaluation(self) -> Dataset:
        path = self.held_out_path or self.path
        return all_held_out(replace(self, path=path, held_out_path=None, held_out_share=0.0).open())

    def _classes(self, folders: Sequence[str]) -> Classes:
        names = [name.replace("_", " ") for name in folders]
        if self.classnames is not None:
            names = list(read_names(self.classnames, "data.classnames"))
            require(
                len(names) == len(folders),
                f"data.classnames={self.classnames} has {len(names)} names where data.path={self.path} has "
                f"{len(folders)} class folders: give one name for each, in the order of the folders' names",
            )
        templates = read_templates(self.templates, "data.templates") if self.templates else ("a photo of a {}.",)
        return Classes(names, templates)

    def _check_known(self, held_out: Sequence[str], folders: Sequence[str]) -> None:
        unknown = sorted(set(held_out) - set(folders))
        if unknown:
            raise DataError(
                f"data.held_out_path={self.held_out_path} has {len(unknown)} class folders that data.path={self.path} "
                f"has not, {', '.join(unknown[:3])}: both need the same names"
            )


def class_folders(path: str, key: str) -> Sequence[str]:
    """The names of the class folders in the folder that the option `key` gives, sorted. Raises ConfigError."""
    root = Path(path).expanduser()
    require(root.is_dir(), f"{key}={path} is not a folder: give one that holds a folder for each class")
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    require(bool(names), f"{key}={path} holds no folders: put the images of each class into a folder of its name")
    return names


@dataclass(frozen=True, slots=True)
class ImageFolder(ImageFiles):
    """A source over the images in class folders, class after class."""

    labels: Packed[int]
    captions: Sequence[Sequence[str]]  # by label

    @classmethod
    def open(cls, path: str, key: str, folders: Sequence[str], classes: Classes) -> ImageFolder:
        """`folders`: the classes in the order of their labels. Raises DataError for one that holds no image."""
        root = Path(path).expanduser()
        found = {label: _images(root, name) for label, name in enumerate(folders) if (root / name).is_dir()}
        empty = [folders[label] for label, images in found.items() if not images]
        if empty:
            raise DataError(
                f"{key}={path}: the class folder {empty[0]} holds no image ({', '.join(IMAGES)})"
                f"{f', nor do {len(empty) - 1} more' if len(empty) > 1 else ''}: put images there, or remove it"
            )
        captions = [[fill(template, name) for template in classes.templates] for name in classes.names]
        images = [image for of_class in found.values() for image in of_class]
        labels = [label for label, of_class in found.items() for _ in of_class]
        facts = "\n".join([*images, *(caption for texts in captions for caption in texts)])
        digest = hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return cls(str(root), Packed.of(images), (), digest, Packed.of(labels), captions)

    def read(self, index: int) -> Sample:
        label = self.labels[index]
        return Sample(read_bounded(self.key(index)), self.captions[label], label)


def _images(root: Path, name: str) -> list[str]:
    """Those of a class, in folders of the class folder too, as paths in `root`."""
    found = [
        os.path.relpath(os.path.join(folder, file), root)  # noqa: PTH118
        for folder, _, files in os.walk(root / name)
        for file in files
        if file.lower().endswith(IMAGES)
    ]
    return sorted(found)
