"""Data sets of Hugging Face, on the hub or in a folder with the same layout: Parquet files or WebDataset tars.

This option finds the files of a split (layout.py) and the columns of images, captions and labels. data=parquet and
data=webdataset read them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.class_names import prompts, read_templates
from clipx.data.image_files import walk
from clipx.data.parquet_file import IMAGE, held
from clipx.data.selection.spec import SelectionSpec
from clipx.data.spec import Classes, Dataset, DataSpec
from clipx.data.webdataset import RemoteFilesSpec, WebDatasetSpec
from clipx.errors import ClipxError, ConfigError, DataError, require, require_effect
from clipx.extra.hf.benchmark import PromptedShards
from clipx.extra.hf.layout import CARD, Repository, single_format
from clipx.extra.hf.parquet import ColumnsSpec, ParquetSpec, caption_columns
from clipx.storage.files import errors_as, is_local, local_path
from clipx.storage.hub_repository import HubFile
from clipx.storage.remote import StorageFolder, read_range, retry
from clipx.storage.url import check_folder_url, check_url

if TYPE_CHECKING:
    from pyarrow import Schema

    from clipx.extra.hf.row_groups import RowColumns

_CARD_BYTES = 1 << 20

log = logging.getLogger(__name__)


def check_commit(key: str, text: str) -> None:
    """Raises ConfigError unless a value of the option `key` is a commit of a repository on the hub."""
    require(
        HubFile("dataset", "", text, "").pinned,
        f"{key}={text} is not a commit of 40 hexadecimal digits: give a branch or tag as "
        "data.path=hf://datasets/OWNER/NAME@REVISION",
    )


@register("data")
@frozen
class HfSpec(ColumnsSpec):
    """A data set of Hugging Face, in a folder or on the hub (hf://): Parquet files or WebDataset tars."""

    path_is = "the folder of a data set or its repository on the hub, e.g. data.path=hf://datasets/OWNER/NAME"
    shards_have_tables = True  # of tars; Parquet files are checked when they are opened

    kind: str = "hf"
    """Kind of data: a data set of Hugging Face."""

    revision: str | None = option(None, check=check_commit)
    """Commit of the repository on the hub, 40 hexadecimal digits. null: that of path when the run starts. It is saved
    with the run, so a resumed run reads the same files."""

    config: str | None = None
    """Name of the configuration (subset). null: the only one, or the default one."""

    split: str = "train"
    """Name of the split to train on."""

    held_out_split: str | None = None
    """Name of the split to evaluate on, such as validation or test. null: held_out_share of split is held out."""

    templates: str | None = None
    """Templates of class names, in Parquet files that have them: openai_imagenet (80), simple (7), or a file with one
    per line, with {} for the class name. null: a photo of a {}."""

    def __post_init__(self) -> None:
        SelectionSpec.__post_init__(self)
        if self.path is not None:
            hub, on_hub = self._hub, self.path.startswith("hf://")
            (check_url if is_local(self.path) or on_hub else check_folder_url)("data.path", self.path)
            require(
                not on_hub or (hub is not None and hub.kind == "dataset" and not hub.path),
                f"data.path={self.path} is not a data set on the hub: give hf://datasets/OWNER/NAME, or data=parquet "
                "data.path=hf://…/*.parquet for files",
            )
        on_hub = self.revision is None or self._hub is not None
        require_effect(on_hub, f"data.revision={self.revision}", "with a data.path that is not on the hub (hf://)")

    @property
    def _hub(self) -> HubFile | None:
        hub = HubFile.parse((self.path or "").rstrip("/"))
        return hub if hub is None or self.revision is None else replace(hub, revision=self.revision)

    def pinned(self, saved: Mapping[str, Any]) -> DataSpec:
        if self._hub is None or self.revision is not None:
            return self
        if saved.get("path") == self.path and isinstance(saved.get("revision"), str):
            return replace(self, revision=saved["revision"])
        return replace(self, revision=self._commit(self._hub))

    def _commit(self, hub: HubFile) -> str:
        if hub.pinned:
            return hub.revision
        with self._hub_errors():
            commit = retry(hub.root, self.retry_s, hub.commit)
        log.info("%s: %s is commit %s", self.name, self.path, commit)
        return commit

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        if self.path is not None and self._hub is None and is_local(self.path):
            self._root(self.path)

    def open(self) -> Dataset:
        repository = self._repository()
        splits = repository.splits(self.config)
        train = repository.files_of(splits, "data.split", self.split)
        held_out = None
        if self.held_out_split is not None:
            held_out = repository.files_of(splits, "data.held_out_split", self.held_out_split)
            require(
                self.held_out_split != self.split,
                f"data.held_out_split={self.held_out_split} is data.split: name another, or null for held_out_share",
            )
        opened = self._open(train, held_out)
        return replace(opened, notes=[*opened.notes, *repository.notes(splits)])

    def open_for_evaluation(self) -> Dataset:
        """Opens held_out_split, or split without one. No other split needs to exist."""
        repository = self._repository()
        key = "split" if self.held_out_split is None else "held_out_split"
        urls = repository.files_of(repository.splits(self.config), f"data.{key}", self.held_out_split or self.split)
        opened = replace(self.unselected(), held_out_share=0.0)._open(urls, None, training=False)
        return replace(opened, held_out=opened.train)

    def _repository(self) -> Repository:
        """Lists the files of the data set, and reads its card."""
        self.check_complete()
        assert self.path is not None
        root, found = self._listed(self.path) if self._hub is None else self._listed_on_hub(self._hub)
        card, size = None, min(found.get(CARD, 0), _CARD_BYTES)
        if size:
            with errors_as(DataError, f"{root}/{CARD} cannot be read", "check the permission to read it"):
                card = read_range(f"{root}/{CARD}", 0, size, self.retry_s).decode("utf-8-sig", "replace")
        return Repository(root, self.path, list(found), card)

    def _listed(self, path: str) -> tuple[str, Mapping[str, int]]:
        """Returns the root of a folder, and the size of each file by its path below it."""
        root = self._root(path)
        with errors_as(DataError, f"data.path={path} cannot be listed", "check the path and the permission to read it"):
            found = _local_files(root) if is_local(root) else retry(root, self.retry_s, StorageFolder(root).files)
        require(bool(found), f"data.path={path} is no folder with files: check the path")
        return root, found

    def _root(self, path: str) -> str:
        root = (local_path(path) if is_local(path) else path).rstrip("/") or "/"
        require(not is_local(path) or Path(root).is_dir(), f"data.path={path} is no folder: check the path")
        return root

    def _listed_on_hub(self, hub: HubFile) -> tuple[str, Mapping[str, int]]:
        """Returns the URL of a commit, and the size of each of its files by path."""
        pinned = replace(hub, revision=self._commit(hub))
        with self._hub_errors():
            return pinned.root, retry(pinned.root, self.retry_s, pinned.files)

    def _hub_errors(self) -> AbstractContextManager[None]:
        fix = "check the names of the data set and of the revision, and set HF_TOKEN if it is private"
        return errors_as(DataError, f"data.path={self.path} cannot be listed on the hub", fix)

    def _open(self, urls: Sequence[str], held_out: Sequence[str] | None, training: bool = True) -> Dataset:
        tars = single_format([*urls, *(held_out or ())], str(self.path)) == ".tar"
        for key in ("image_column", "templates") if tars else ():
            require_effect(getattr(self, key) is None, f"data.{key}={getattr(self, key)}", "on tars")
        return self._open_tars(urls, held_out, training) if tars else self._open_parquet(urls, held_out, training)

    def _open_tars(self, urls: Sequence[str], held_out: Sequence[str] | None, training: bool) -> Dataset:
        try:
            spec = WebDatasetSpec(
                **self._shared(),
                caption_key="txt" if self.caption_column is None else self.caption_column,
                label_key=self.label_column,
                read="auto" if training else "range",
            )
            return spec.open_files(urls, held_out)
        except ClipxError as error:  # with the keys of data=webdataset
            text = re.sub(r"\bdata\.(caption|label)_key\b", r"data.\1_column", str(error))
            if text == str(error):
                raise
            raise type(error)(text) from None

    def _open_parquet(self, urls: Sequence[str], held_out: Sequence[str] | None, training: bool) -> Dataset:
        from clipx.extra.hf.row_groups import open_parquet_file

        columns, names = self._columns(urls[0], open_parquet_file(urls[0], self.retry_s).schema())
        given, reason = f"data.templates={self.templates}", "without a column of labels with class names"
        require_effect(bool(names) or self.templates is None, given, reason)
        classes = None
        if names:
            templates = read_templates(self.templates, "data.templates")
            classes = Classes([name.replace("_", " ") for name in names], templates)
        spec = ParquetSpec(**self._shared())
        opened = replace(spec.open_files(urls, held_out, columns), classes=classes)
        if columns.captions:
            return opened
        if classes is None:
            raise ConfigError(
                f"data.label_column={columns.label} of {urls[0]} has no class names, of which captions are made: name "
                "a column of captions with data.caption_column=…"
            )
        held, texts = opened.held_out, prompts(classes.names, classes.templates)
        return replace(
            opened,
            train=PromptedShards(opened.train, texts, training),
            held_out=None if held is None else PromptedShards(held, texts, trained_on=False),
        )

    def _columns(self, url: str, schema: Schema) -> tuple[RowColumns, Sequence[str]]:
        """Returns the columns of the options, or else the only candidates, and the class names of the labels. Raises
        ConfigError."""
        from clipx.extra.hf.row_groups import RowColumns

        images, texts, class_names = candidates(schema)
        image, captions, label = self.image_column, self.caption_column, self.label_column
        if image is None:
            require(bool(images), f"{url} has no column of images: give a data set with images, or data.image_column=…")
            image = _only(url, images, "images", "image_column")
        if captions is None and (texts or not class_names):
            require(
                bool(texts),
                f"{url} has neither texts nor a column of labels with class names: give a data set with captions, or "
                "write captions with python -m clipx.prepare",
            )
            captions = _only(url, texts, "captions", "caption_column")
        if label is None and class_names and (captions is None or len(class_names) == 1):
            label = _only(url, list(class_names), "labels", "label_column")
        weighted = () if captions is None else caption_columns("data.caption_column", captions)
        return RowColumns(image, weighted, label), class_names.get(label or "", ())

    def _shared(self) -> dict[str, Any]:
        """Returns the options that data=parquet and data=webdataset have, too."""
        names = [f.name for f in dataclasses.fields(RemoteFilesSpec) if f.name != "kind"]
        return {name: getattr(self, name) for name in names}


def _local_files(root: str) -> dict[str, int]:
    """Returns the size of each file below a folder. Links are followed: the cache of the hub has these."""
    files = map(Path, walk(root, "data.path"))
    return {str(file.relative_to(root)): file.stat().st_size for file in files if file.is_file()}


# ------------------------------------------------------------------------------------------------ columns of Parquet


def candidates(schema: Schema) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Returns the columns of images, those of texts, and the class names of each column of labels."""
    kinds, features = {field.name: field.type for field in schema}, _features(schema)
    labels = {
        name: [str(one) for one in feature["names"]]
        for name, feature in features.items()
        if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
    }
    images = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    texts = [name for name, kind in kinds.items() if name not in labels and held(kind) in ("text", "list of text")]
    return images or [name for name, kind in kinds.items() if IMAGE.fits(kind)], texts, labels


def _features(schema: Schema) -> dict[str, dict[str, Any]]:
    """Returns the features by column, {} if the file has none that can be read."""
    try:
        features = dict(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return {name: feature for name, feature in features.items() if name in schema.names and isinstance(feature, dict)}


def _only(url: str, names: Sequence[str], what: str, key: str) -> str:
    require(len(names) == 1, f"{url} has several columns of {what}: {', '.join(names)}; name one with data.{key}=…")
    return names[0]
