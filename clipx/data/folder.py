"""Folder of class folders, path/CLASS/*.jpg: labelled images. Their captions are templates with the class name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipx.config.registry import frozen, register
from clipx.data.class_names import prompts, read_names, read_templates
from clipx.data.image_files import IMAGES, READ, ImageFiles, Packed, ending_unread, is_hidden, walk
from clipx.data.selection.spec import LocalFilesSpec, SelectionSpec
from clipx.data.source import Sample, read_bounded, split
from clipx.data.spec import Classes, Dataset
from clipx.errors import DataError, require


@register("data")
@frozen
class FolderSpec(LocalFilesSpec):
    """A folder of class folders, path/CLASS/*.jpg: labelled images. Their captions are templates with the class name.

    Images are jpg, png, jpeg or webp, also in subfolders and linked folders. Classes of held_out_path must be among
    those of path. Label i is the i-th class folder in the order of names; folders that are all numbers are in the order
    of these.
    """

    kind: str = "folder"
    """Kind of data: a folder with one folder of images per class."""

    path_is = "a folder of class folders, e.g. data.path=/data/train"

    classnames: str | None = None
    """Class names in the order of the folder names: imagenet, or a file with one name per line. null: the names of the
    folders, with spaces for underscores."""

    templates: str | None = None
    """Caption templates: openai_imagenet (80), simple (7), or a file with one per line, with {} for the class name.
    null: a photo of a {}."""

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        for key, path in (("data.path", self.path), ("data.held_out_path", self.held_out_path)):
            if path is not None:
                class_folders(path, key)

    def open(self) -> Dataset:
        self.check_complete()
        assert self.path is not None
        folders = class_folders(self.path, "data.path")
        classes = self._classes(folders)
        train = ImageFolder.open(self.path, "data.path", folders, classes)
        if self.held_out_path is None:
            return self.select_files(Dataset(*split(train, self.held_out_share), classes, notes=train.notes))
        self._check_known(class_folders(self.held_out_path, "data.held_out_path"), folders)
        held_out = ImageFolder.open(self.held_out_path, "data.held_out_path", folders, classes)
        return self.select_files(Dataset(train, held_out, classes, notes=[*train.notes, *held_out.notes]))

    def _classes(self, folders: Sequence[str]) -> Classes:
        names = [name.replace("_", " ") for name in folders]
        if self.classnames is not None:
            names = list(read_names(self.classnames, "data.classnames"))
            require(
                len(names) == len(folders),
                f"data.classnames={self.classnames} has {len(names)} names where data.path={self.path} has "
                f"{len(folders)} class folders: give one name per folder, in the order of the folder names",
            )
        for name in names:
            require(
                not any("\ud800" <= character <= "\udfff" for character in name),
                f"data.path={self.path}: the class folder {name} is not named in UTF-8, and its name is part of the "
                "captions: rename it, or give the class names by data.classnames=FILE",
            )
        return Classes(names, read_templates(self.templates, "data.templates"))

    def _check_known(self, held_out: Sequence[str], folders: Sequence[str]) -> None:
        unknown = sorted(set(held_out) - set(folders))
        if unknown:
            raise DataError(
                f"data.held_out_path={self.held_out_path} has {len(unknown)} class folders that data.path={self.path} "
                f"does not have ({', '.join(unknown[:3])}): use the same names in both"
            )


def class_folders(path: str, key: str) -> Sequence[str]:
    """Returns the names of the class folders in `path` in the order of the labels. Raises ConfigError. `key`: the
    option that has the path."""
    root = Path(path)
    require(root.is_dir(), f"{key}={path} is not a folder: give one that contains a folder per class")
    found = [entry for entry in os.scandir(root) if not is_hidden(entry.name)]
    for entry in found:
        require(
            not entry.is_symlink() or Path(entry).exists(),
            f"{key}={path}: the link {entry.name} leads to nothing: restore the folder, or remove the link",
        )
    names = sorted(entry.name for entry in found if entry.is_dir())
    require(bool(names), f"{key}={path} contains no folders: put the images of each class into a folder named after it")
    return sorted(names, key=int) if all(map(str.isdecimal, names)) else names  # as in ImageNetV2: 0, 1, 2, … 10


@dataclass(frozen=True, slots=True)
class ImageFolder(ImageFiles):
    """Source over the images in class folders, ordered by class."""

    labels: Packed[int]
    captions: Sequence[Sequence[str]]  # by label
    notes: Sequence[str]

    @classmethod
    def open(cls, path: str, key: str, folders: Sequence[str], classes: Classes) -> ImageFolder:
        """Lists the images. `folders`: the classes in label order. Raises DataError for a class without images."""
        root = Path(path)
        files = {
            label: sorted(os.path.relpath(file, root) for file in walk(str(root / name), key))
            for label, name in enumerate(folders)
            if (root / name).is_dir()
        }
        found = {label: images_of(of_class) for label, of_class in files.items()}
        empty = [folders[label] for label, images in found.items() if not images]
        if empty:
            raise DataError(
                f"{key}={path}: the class folder {empty[0]} contains no image ({', '.join(IMAGES)})"
                f"{f', nor do {len(empty) - 1} more' if len(empty) > 1 else ''}: put images there, or remove it"
            )
        notes = unread_notes(path, [file for of_class in files.values() for file in of_class])
        apart = images_of(sorted(entry.name for entry in os.scandir(root) if entry.is_file()))
        notes += [f"{path}: {len(apart):,} images are in no class folder and not read, e.g. {one}" for one in apart[:1]]
        captions = prompts(classes.names, classes.templates)
        images = [image for of_class in found.values() for image in of_class]
        labels = [label for label, of_class in found.items() for _ in of_class]
        facts = "\n".join([*images, *(caption for texts in captions for caption in texts)])
        digest = hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return cls(str(root), Packed.of(images), (), digest, Packed.of(labels), captions, notes)

    def read(self, index: int) -> Sample:
        label = self.labels[index]
        return Sample(read_bounded(self.key(index)), self.captions[label], label)


def images_of(files: Iterable[str]) -> list[str]:
    """Returns the files that are read as images, by their names, in their order."""
    return [file for file in files if file.lower().endswith(IMAGES) and not is_hidden(file)]


def unread_notes(path: str, files: Sequence[str]) -> list[str]:
    """Returns notes on the images among the files of a folder that are not read: of other formats, and hidden ones."""
    other = [file for file in files if ending_unread(file) and not is_hidden(file)]
    hidden = [file for file in files if file.lower().endswith(IMAGES) and is_hidden(file)]
    notes = [f"{path}: {len(other):,} images are not read, e.g. {one}: convert them to {READ}" for one in other[:1]]
    return notes + [
        f"{path}: {len(hidden):,} hidden images are not read, e.g. {one}: macOS writes ._ files; rename other images"
        for one in hidden[:1]
    ]
