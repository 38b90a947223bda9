"""Data sets in clip_benchmark's layout, in a folder or at a URL:

classnames.txt                          one class name per line, in the order of the labels
zeroshot_classification_templates.txt   one template per line, {c} is replaced by the name
dataset_type.txt                        retrieval or classification; without the file: classification
SPLIT/nshards.txt                       number of shards
SPLIT/0.tar …                           jpg, png or webp + cls (an index); for retrieval + txt, one caption per line
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.class_names import parse_templates, prompts
from clipx.data.shards.cache import Access
from clipx.data.shards.index import RETRY_S
from clipx.data.shards.shards import Shards
from clipx.data.source import BadSample, Sample, Source, WrappedSource
from clipx.data.spec import Classes, Dataset, DataSpec
from clipx.errors import DataError, require
from clipx.storage.files import decode, errors_as, is_local, local_path, read_file
from clipx.storage.url import check_url

_CLASSES, _TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
_TYPE, _NUMBER = "dataset_type.txt", "nshards.txt"
_MOST_SHARDS = 1_000_000


def _check_split(key: str, name: str) -> None:
    require(bool(name), f"{key}= is empty: give the name of a folder of the set, such as test")


@register("data")
@frozen
class BenchmarkSpec(DataSpec):
    """A data set in clip_benchmark's layout: WebDataset shards with class names and templates next to them.

    The captions of a classification set are its templates filled with the class name.
    """

    kind: str = "benchmark"
    """Kind of data: a set in clip_benchmark's layout."""

    path: str | None = option(None, check=check_url)
    """Folder of the set, as a path or URL (s3://…, https://…). Required."""

    split: str = option("train", check=_check_split)
    """Subfolder with the shards to train on."""

    held_out_split: str | None = option("test", check=_check_split)
    """Subfolder with the shards to evaluate on. null: nothing is held out in training, and evaluation reads split."""

    retry_s: float = option(RETRY_S, ge=0, unit="s", hint="0 tries once")
    """Time for which a failed read of a remote file is repeated before the run ends; 0 tries once."""

    cache_gb: float = option(0.0, ge=0, unit="GB", hint="0 for no cache")
    """Size limit of the local cache of whole remote shards. 0: no cache, samples are read by range requests."""

    cache_dir: str | None = None
    """Folder of the cache of remote shards, best on a local disk. null: shards in clipx's cache folder."""

    path_is: ClassVar[str] = "the folder of the set, e.g. data.path=/data/wds_cars"

    def check_files(self) -> None:
        if self.path is not None and is_local(self.path):
            root = Path(local_path(self.path))
            require(root.is_dir(), f"data.path={self.path} is not a folder: check the path")

    def open(self) -> Dataset:
        layout = self._layout()
        train = layout.source(self.split, trained_on=True)
        held_out = None if self.held_out_split is None else layout.source(self.held_out_split)
        return Dataset(train, held_out, layout.classes)

    def open_for_evaluation(self) -> Dataset:
        """Opens held_out_split, or split without one. No other split needs to exist."""
        layout = self._layout()
        source = layout.source(self.held_out_split or self.split)
        return Dataset(source, source, layout.classes)

    def _layout(self) -> _BenchmarkSet:
        self.check_complete()
        assert self.path is not None
        root = local_path(self.path) if is_local(self.path) else self.path
        return _BenchmarkSet(root.rstrip("/"), Access(self.retry_s, int(self.cache_gb * 1e9), self.cache_dir))


@dataclass(frozen=True)
class _BenchmarkSet:
    """Files of a set, read once, on first access."""

    path: str
    access: Access

    def source(self, split: str, trained_on: bool = False) -> Source:
        """Opens a split as a source. Raises DataError if it does not exist."""
        number = self._text(f"{split}/{_NUMBER}")
        if number is None:
            raise DataError(
                f"data.path={self.path} has no {split}/{_NUMBER}: give a set in clip_benchmark's layout, and the "
                "names of its splits as data.split and data.held_out_split"
            )
        digits = number.strip()
        if not (digits.isdecimal() and len(digits) < 10 and 1 <= int(digits) <= _MOST_SHARDS):
            raise DataError(f"{self.path}/{split}/{_NUMBER} contains {digits[:40]!r}: it must be the number of shards")
        urls = [f"{self.path}/{split}/{shard}.tar" for shard in range(int(number))]
        if self.kind == "retrieval":
            return MultiCaptionShards(Shards.open(urls, "txt", None, self.access))
        texts = prompts(self._names or (), self._templates)
        return PromptedShards(Shards.open(urls, None, "cls", self.access), texts, trained_on)

    @cached_property
    def kind(self) -> str:
        kind = (self._text(_TYPE) or "classification").strip().lower()
        if kind not in ("classification", "retrieval"):
            raise DataError(f"{self.path}/{_TYPE} contains {kind[:40]!r}: it must be classification or retrieval")
        return kind

    @cached_property
    def classes(self) -> Classes | None:
        """Returns the classes; None for a retrieval set or without class names. Templates may be empty."""
        return Classes(self._names, self._templates) if self.kind == "classification" and self._names else None

    @cached_property
    def _names(self) -> Sequence[str] | None:
        text = self._text(_CLASSES)
        return None if text is None else _lines(text)

    @cached_property
    def _templates(self) -> Sequence[str]:
        lines = _lines(self._text(_TEMPLATES) or "")
        return parse_templates([line for line in lines if line], f"{self.path}/{_TEMPLATES}")

    def _text(self, name: str) -> str | None:
        """Returns the text of a small file; None if it does not exist."""
        url = f"{self.path}/{name}"
        try:
            with errors_as(DataError, f"{url} cannot be read", "check the path", FileNotFoundError):
                return decode(read_file(url, self.access.retry_s))
        except (FileNotFoundError, NotADirectoryError):
            return None


def _lines(text: str) -> list[str]:
    """Returns the lines, also empty ones before the last: their numbers are labels."""
    return [line.strip() for line in text.rstrip("\n").split("\n")] if text.strip() else []


@dataclass(frozen=True, slots=True)
class MultiCaptionShards(WrappedSource):
    """Source in which each line of the caption is a separate caption."""

    def read(self, index: int) -> Sample:
        sample = self.source.read(index)
        return replace(sample, captions=[line for line in _lines(sample.captions[0]) if line])


@dataclass(frozen=True, slots=True)
class PromptedShards(WrappedSource):
    """Source whose captions are the `prompts` of the label. In training a sample of a label without prompts is bad."""

    prompts: Sequence[Sequence[str]]
    trained_on: bool

    @property
    def fingerprint(self) -> str:
        prompts = "\n".join(prompt for prompts in self.prompts for prompt in prompts)
        return hashlib.sha256(f"{self.source.fingerprint} {prompts}".encode()).hexdigest()[:16]

    def read(self, index: int) -> Sample:
        sample = self.source.read(index)
        if not isinstance(sample.label, int):
            raise BadSample(f"label {sample.label!r} is not an index")
        captions = self.prompts[sample.label] if 0 <= sample.label < len(self.prompts) else ()
        if self.trained_on and not captions:
            raise BadSample(f"label {sample.label} has no caption: {_CLASSES} or {_TEMPLATES} has no entry for it")
        return replace(sample, captions=captions)
