"""Columns of images, captions and labels of a Parquet file, by the features that the library `datasets` writes into it.

A file without features is judged by the types of its columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clipx.data.parquet_file import is_image, is_string, is_strings
from clipx.errors import ConfigError, require

if TYPE_CHECKING:
    from pyarrow import Schema

_KEY = b"huggingface"  # in the metadata of the schema


@dataclass(frozen=True, slots=True)
class Columns:
    """The candidates of a file: names of columns. `class_names`: of each column of labels."""

    url: str
    images: Sequence[str]
    captions: Sequence[str]
    class_names: dict[str, Sequence[str]]

    @classmethod
    def of(cls, url: str, schema: Schema) -> Columns:
        """Finds the candidates by the features of the schema, or else by its types."""
        features = _features(schema)
        kinds = {field.name: field.type for field in schema}
        images = [name for name, feature in features.items() if _is(feature, "Image")]
        texts = [name for name in kinds if is_string(kinds[name]) or is_strings(kinds[name])]
        labels = {
            name: [str(one) for one in feature["names"]]
            for name, feature in features.items()
            if _is(feature, "ClassLabel") and isinstance(feature.get("names"), list)
        }
        return cls(
            url,
            images or [name for name in kinds if is_image(kinds[name])],
            [name for name in texts if name not in labels],
            {name: names for name, names in labels.items() if name in kinds},
        )

    def image(self, given: str | None) -> str:
        """Returns the column of images: that of data.image_column, or the only candidate. Raises ConfigError."""
        if given is not None:
            return given
        require(
            bool(self.images),
            f"{self.url} has no column of images: give a data set with images, or data.image_column=…",
        )
        return self._only(self.images, "images", "image_column")

    def caption(self, given: Any, labelled: bool) -> Any:
        """Returns the columns of captions: data.caption_column, or the only candidate. None: prompts of the label."""
        if given is not None:
            return given
        if not self.captions and labelled:
            return None
        require(
            bool(self.captions),
            f"{self.url} has neither texts nor a column of labels with class names: give a data set with captions, or "
            "write captions with python -m clipx.data.prepare",
        )
        return self._only(self.captions, "captions", "caption_column")

    def label(self, given: str | None) -> str | None:
        """Returns the column of labels: that of data.label_column, or the only one with class names, if any."""
        if given is not None or len(self.class_names) != 1:
            return given
        return next(iter(self.class_names))

    def check_label(self, label: str | None, captions: Any) -> None:
        """Raises ConfigError if captions have to be made of labels, and there are several columns of these."""
        if captions is None and label is None:
            self._only(list(self.class_names), "labels", "label_column")

    def _only(self, names: Sequence[str], what: str, key: str) -> str:
        if len(names) != 1:
            raise ConfigError(
                f"{self.url} has several columns of {what}: {', '.join(names)}; name one with data.{key}=…"
            )
        return names[0]


def _is(feature: Any, kind: str) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == kind


def _features(schema: Schema) -> dict[str, Any]:
    """Returns the features by column, {} if the file has none that can be read."""
    try:
        features = json.loads((schema.metadata or {})[_KEY])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return (
        {name: feature for name, feature in features.items() if name in schema.names}
        if isinstance(features, dict)
        else {}
    )
