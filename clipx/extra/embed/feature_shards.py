"""WebDataset shards of stored image features, on which a text tower trains without images (model.image.features).

out/00000.tar        a sample for each usable sample of the source. Its key is the index in the source, 9 digits
      000000000.npy  features of the image, one row
      000000000.json {"captions": [...], "label": index or name, if the sample has one}
    classnames.txt   class names of the source, one per line, in the order of the labels
    templates.txt    templates of the source, one per line
"""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clipx.data.shards.write import ShardSample, write_samples
from clipx.data.spec import Classes
from clipx.storage.files import filled_lines
from clipx.storage.part_store import PartStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASS_NAMES, TEMPLATES = "classnames.txt", "templates.txt"

FeatureSample = tuple[int, "NDArray[Any]", Sequence[str], int | str | None]
"""Index in the source, features [F], captions and label."""


def shard_file(number: int) -> str:
    """Returns the name of a shard."""
    return f"{number:05d}.tar"


def write_shard(samples: list[FeatureSample]) -> Callable[[str], object]:
    """Returns a function that writes the samples to a path."""
    return lambda path: write_samples(path, _members(samples))


def _members(samples: list[FeatureSample]) -> Iterator[ShardSample]:
    for index, row_F, captions, label in samples:
        file = io.BytesIO()
        np.save(file, row_F, allow_pickle=False)
        meta = {"captions": list(captions), **({} if label is None else {"label": label})}
        yield {"__key__": f"{index:09d}", "npy": file.getvalue(), "json": json.dumps(meta).encode()}


def write_classes(store: PartStore, classes: Classes | None) -> tuple[str, ...]:
    """Writes the class names and templates. Returns the names of the files written.

    Names that a file with one per line cannot represent, because they repeat or have line breaks, are not written.
    """
    lists = {} if classes is None else {CLASS_NAMES: classes.names, TEMPLATES: classes.templates}
    written = []
    for name, values in lists.items():
        text = "".join(f"{line}\n" for line in values)
        read_back = list(dict.fromkeys(filled_lines(text.encode())))
        if values and read_back == list(values):
            store.put_text(name, text)
            written.append(name)
    return tuple(written)


def usage(out: str, split: str, width: int, labels: bool, classes: Sequence[str]) -> str:
    """Returns the command that trains on the shards of split=train, the option that evaluates on those of held_out."""
    shards = shlex.quote(f"{out}/*.tar")
    if split != "train":
        return f"evaluate a text tower on them: data.held_out_shards={shards}"
    options = [f"model.image.features={width}", "data=webdataset", f"data.shards={shards}"]
    options.append("data.caption_key=json.captions")
    keys = {CLASS_NAMES: "evaluator.zeroshot.classnames", TEMPLATES: "evaluator.zeroshot.templates"}
    if labels:
        options.append("data.label_key=json.label")
    if labels and classes:
        options.append("evaluator=[zeroshot,retrieval]")
        options += [f"{keys[name]}={shlex.quote(f'{out}/{name}')}" for name in classes]
    return f"train a text tower on them: python -m clipx.train model=stored_features {' '.join(options)}"
