"""Class names and templates: lists of lines, from a file of the user or among those installed with clipx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from clipx.config.lazy_torch import torch
from clipx.config.suggestions import did_you_mean
from clipx.errors import ConfigError, require
from clipx.storage.files import filled_lines

_LISTS = Path(__file__).parent / "lists"
NAMES = ("imagenet",)  # 1,000, in the order of the labels
TEMPLATES = ("openai_imagenet", "simple")  # 80 templates, and a subset of 7


def read_names(value: str, key: str) -> Sequence[str]:
    """Returns class names in the order of the labels. `value` is the value of the option `key`: one of NAMES, or a file
    with one name per line. Raises ConfigError."""
    if value in NAMES:
        return _lines(_LISTS / f"{value}.txt", value, key, NAMES)
    names = _lines(Path(value), value, key, NAMES)
    ((twice, count),) = Counter(names).most_common(1)
    require(count == 1, f"{key}={value} names {twice!r} twice: class names must differ")
    return names


def read_templates(value: str | None, key: str) -> Sequence[str]:
    """Returns templates with {} for the class name. Raises ConfigError. `value` is the value of the option `key`: one
    of TEMPLATES, or a file with one template per line, in which {}, or {c} as in clip_benchmark, is replaced by the
    name. None: a photo of a {}."""
    if not value:
        return ("a photo of a {}.",)
    path = _LISTS / f"{value}.txt" if value in TEMPLATES else Path(value)
    return parse_templates(_lines(path, value, key, TEMPLATES), f"{key}={value}")


def class_embeddings(
    embed: Callable[[Sequence[str]], torch.Tensor], names: Sequence[str], templates: Sequence[str]
) -> torch.Tensor:
    """Returns [C, D]: the mean embedding of each class over the templates, renormalised (arXiv:2103.00020). `embed`
    maps N texts to [N, D]."""
    text_CTD = embed([text for texts in prompts(names, templates) for text in texts])
    text_CTD = text_CTD.unflatten(0, (len(names), len(templates)))
    return torch.nn.functional.normalize(text_CTD.mean(1), dim=-1)


def parse_templates(given: Sequence[str], where: str) -> Sequence[str]:
    """Returns templates with {c} replaced by {}. Raises ConfigError for one without a placeholder."""
    templates = [line.replace("{c}", "{}") for line in given]
    if bad := [line for line in templates if "{}" not in line]:
        raise ConfigError(f"{where}: {bad[0]!r} has no {{}} for the class name: add it")
    return templates


def prompts(names: Sequence[str], templates: Sequence[str]) -> list[list[str]]:
    """Returns the templates filled with each name."""
    return [[template.replace("{}", name) for template in templates] for name in names]


def _lines(path: Path, value: str, key: str, known: Sequence[str]) -> Sequence[str]:
    try:
        found = filled_lines(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{key}={value} cannot be read: {reason}; give a file with one per line, or {' or '.join(known)}"
            f"{did_you_mean(value, known)}"
        ) from None
    require(bool(found), f"{key}={value} is empty: write one entry per line")
    return found
