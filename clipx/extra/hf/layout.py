"""Layout of Hugging Face data sets: which Parquet files or tars make up a split of a configuration.

A card, the header of README.md, may name them. Without one they follow from the names of folders and files, by the
rules of the library `datasets`. Only names are looked at, and nothing of a repository is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipx.config.safe_yaml import plain_values
from clipx.config.suggestions import did_you_mean
from clipx.data.image_files import IMAGES
from clipx.errors import DataError, require
from clipx.storage.pattern import matcher
from clipx.storage.safe_json import shown

FORMATS = (".parquet", ".tar")
CARD = "README.md"
_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_NAMES)})(?=[-._ 0-9]|$)")
_NUMBERED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")  # train-00000-of-00003.parquet
_LISTED = 8  # names that an error lists
_PATTERNS = 1000  # largest number of a configuration of a card

Splits = Mapping[str, Sequence[str]]  # paths of the files of each split, by its name


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of a data set. `root`: its folder or URL, `shown`: as the user gave it."""

    root: str
    shown: str
    files: Sequence[str]
    card: str | None  # text of README.md; None if there is none

    def splits(self, config: str | None) -> Splits:
        """Returns the splits of a configuration. None: the only or default one. Raises ConfigError or DataError."""
        files, known = self._read(), self._configs()
        if not known:
            require(
                config is None, f"data.config={config} is not in data.path={self.shown}, which has no configurations"
            )
            return self._checked(_by_name(files))
        if config is None:
            config = _default(known)
            require(
                config is not None,
                f"data.path={self.shown} has several configurations: choose one of {_some(known)} with data.config=…",
            )
        require(
            config in known,
            f"data.config={config} is not in data.path={self.shown}: choose one of {_some(known)}"
            f"{did_you_mean(str(config), list(known))}",
        )
        return self._checked(_of_card(known[str(config)], files, f"{self.shown}: {CARD}"))

    def files_of(self, splits: Splits, key: str, split: str) -> list[str]:
        """Returns the URLs of a split, the value of the option `key`. Raises ConfigError."""
        require(
            split in splits,
            f"{key}={split} is not in data.path={self.shown}: choose one of {_some(splits)}"
            f"{did_you_mean(split, list(splits))}",
        )
        return [f"{self.root}/{path}" for path in splits[split]]

    def notes(self, splits: Splits) -> list[str]:
        """Returns a remark on the files that belong to no split, if there are any."""
        if self._configs():
            return []
        used = {path for paths in splits.values() for path in paths}
        unused = [path for path in self._read() if path.endswith(FORMATS) and path not in used]
        return [f"{len(unused):,} files belong to no split and are not read, e.g. {unused[0]}"] if unused else []

    def _read(self) -> list[str]:
        return sorted(path for path in self.files if _is_read(path))

    def _configs(self) -> dict[str, dict[str, Any]]:
        return self._card_configs() or _folder_configs(self._read())

    def _card_configs(self) -> dict[str, dict[str, Any]]:
        """Returns the configurations of the card that name files, by name."""
        if self.card is None or not self.card.startswith("---"):
            return {}
        header, end, _ = self.card[3:].partition("\n---")
        try:
            if not end:
                raise ValueError("its header has no end, ---")
            values = plain_values(header)
        except ValueError as error:
            raise DataError(f"{self.shown}: the header of {CARD} cannot be read ({error}): correct it") from None
        listed = values.get("configs") if isinstance(values, dict) else None
        configs = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        named = {str(one.get("config_name", "default")): one for one in configs}
        return {name: one for name, one in named.items() if "data_files" in one or "data_dir" in one}

    def _checked(self, splits: Splits) -> Splits:
        """Returns the splits that have files in a format that is read. Raises DataError if there are none."""
        found = {name: [path for path in paths if path.endswith(FORMATS)] for name, paths in splits.items()}
        found = {name: paths for name, paths in found.items() if paths}
        if not found:
            raise DataError(f"data.path={self.shown} {self._unreadable()}")
        return found

    def _unreadable(self) -> str:
        """Returns the reason why a repository without Parquet files and tars cannot be read, and the fix."""
        files = self._read()
        hub = self.root.startswith("hf://")
        # The hub converts the first 5 GB of a data set to Parquet, in this branch.
        branch = f"data.path={self.shown.partition('@')[0]}@refs/convert/parquet, which the hub may have written"
        if any(path.endswith(".arrow") for path in files):
            return (
                "holds Arrow files, as of save_to_disk: write Parquet files with datasets.load_from_disk(FOLDER)"
                "['train'].to_parquet('train.parquet')"
            )
        if any(path.lower().endswith(IMAGES) for path in files):
            if hub:
                return f"holds single images: give {branch}, or a downloaded copy to data=csv or data=folder"
            return (
                "holds single images: give data=folder for class folders, or data=csv for a table of captions, with "
                "data.image_column=file_name for metadata.csv; write metadata.jsonl as a table"
            )
        if any("/" not in path and path.endswith(".py") for path in files):
            fix = f"give {branch}" if hub else "run it with the library datasets, and give what to_parquet writes"
            return f"holds a loading script, which clipx does not execute: {fix}"
        endings = sorted({f".{path.rpartition('.')[2]}" for path in files if "." in path.rpartition("/")[2]})
        holds = f"only {', '.join(endings[:_LISTED])}" if endings else "no file"
        return f"holds neither Parquet files nor tars ({holds}): give " + (branch if hub else "a folder with some")


def single_format(urls: Iterable[str], shown: str) -> str:
    """Returns the format that all files have. Raises DataError."""
    endings = sorted({next(ending for ending in FORMATS if url.endswith(ending)) for url in urls})
    if len(endings) > 1:
        raise DataError(
            f"data.path={shown} has Parquet files and tars in the same split: give data=parquet data.path=FILES or "
            "data=webdataset data.shards=FILES"
        )
    return endings[0]


def _is_read(path: str) -> bool:
    """Returns whether a file is not hidden, nor in a hidden folder such as .cache or __pycache__."""
    return not any(part.startswith((".", "__")) for part in path.split("/"))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


def _default(configs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the configuration that is read without data.config. None if it has to be chosen."""
    if len(configs) == 1:
        return next(iter(configs))
    marked = [name for name, config in configs.items() if config.get("default") is True]
    return next(iter(marked), "default" if "default" in configs else None)


# --------------------------------------------------------------------------------------------------- by the card


def _of_card(config: Mapping[str, Any], files: Sequence[str], where: str) -> Splits:
    """Returns the files of each split of a configuration: by its patterns, else by the names in its folder."""
    folder = str(config.get("data_dir", "")).strip("/")
    inside = [path for path in files if not folder or path.startswith(f"{folder}/")]
    if "data_files" not in config:
        return _by_name(inside, folder)
    splits: dict[str, list[str]] = {}
    for split, pattern in _patterns(config["data_files"], where):
        full = (f"{folder}/{pattern}" if folder else pattern).removeprefix("./")
        tests = [matcher(full), matcher(f"{full.rstrip('/')}/**")]  # a folder names all of its files
        splits.setdefault(split, []).extend(path for path in inside if any(test(path) for test in tests))
    return {split: list(dict.fromkeys(paths)) for split, paths in splits.items()}


def _patterns(value: Any, where: str) -> list[tuple[str, str]]:
    """Returns (split, pattern) of each pattern of a card's `data_files`. Raises DataError."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        listed = value if isinstance(value, list) else [value]
        items = [
            (one.get("split", "train"), one.get("path")) if isinstance(one, dict) else ("train", one) for one in listed
        ]
    found = [(str(split), path) for split, paths in items for path in (paths if isinstance(paths, list) else [paths])]
    if len(found) > _PATTERNS:
        raise DataError(
            f"{where} names {len(found):,} patterns of files, more than {_PATTERNS:,}: name folders, or use *"
        )
    for split, path in found:
        if not isinstance(path, str) or "://" in path or path.startswith("/") or ".." in path.split("/"):
            raise DataError(
                f"{where} names {shown(path)} as files of {shown(split)}: correct it to a path in the repository"
            )
    return found


# ---------------------------------------------------------------------------------------------------- by the names


def _folder_configs(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the configurations of a repository with one folder for each, CONFIG/train/0000.parquet."""
    data = [path for path in files if path.endswith(FORMATS)]
    folders = dict.fromkeys(path.partition("/")[0] if "/" in path else "" for path in data)
    named = all(folder and folder != "data" and _split_of_name(folder) is None for folder in folders)
    inside = ([path.partition("/")[2] for path in data if path.startswith(f"{folder}/")] for folder in folders)
    return {folder: {"data_dir": folder} for folder in folders} if named and all(map(_rule, inside)) else {}


def _by_name(files: Sequence[str], folder: str = "") -> Splits:
    """Returns the splits that the names of files in `folder` tell. All files are train if they tell none."""
    names = {path: path[len(folder) :].lstrip("/") for path in files if path.endswith(FORMATS)}
    rule = _rule(list(names.values()))
    splits: dict[str, list[str]] = {}
    for path, name in names.items():
        if (split := "train" if rule is None else rule(name)) is not None:
            splits.setdefault(split, []).append(path)
    return splits


def _rule(names: Sequence[str]) -> Callable[[str], str | None] | None:
    """Returns the first rule that finds the split of a file."""
    return next((rule for rule in (_numbered_split, _folder_split, _file_split) if any(map(rule, names))), None)


def _numbered_split(path: str) -> str | None:
    found = _NUMBERED.fullmatch(path.rpartition("/")[2])
    return None if found is None else found[1]


def _folder_split(path: str) -> str | None:
    return next(filter(None, map(_split_of_name, path.split("/")[:-1])), None)


def _file_split(path: str) -> str | None:
    return _split_of_name(path.rpartition("/")[2])


def _split_of_name(name: str) -> str | None:
    found = _WORD.search(name.lower())
    return None if found is None else _NAMES[found[1]]
