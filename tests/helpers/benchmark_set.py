"""An image set as clip_benchmark reads it from WebDataset shards, for clip_benchmark's process and for clipx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from clipx.data.shards.write import ShardSample, write_samples


def write_set(
    folder: Path,
    images_by_class: Mapping[str, Sequence[bytes]],
    templates: Sequence[str] = ("a photo of a {c}.",),
    *,
    split: str = "test",
    shards: int = 2,
) -> Path:
    """Writes `<split>/N.tar` with NAME.jpg and NAME.cls, their number, class names and templates. Returns the folder.

    The images are JPEGs; {c} in a template is the class. Classes are mixed in the shards; label i of `images_by_class`
    is its i-th key.
    """
    samples = [(image, label) for label, images in enumerate(images_by_class.values()) for image in images]
    for shard in range(shards):
        (folder / split).mkdir(parents=True, exist_ok=True)
        written: list[ShardSample] = []
        for number in range(shard, len(samples), shards):
            image, label = samples[number]
            written.append({"__key__": f"s{number:07d}", "jpg": image, "cls": str(label).encode()})
        write_samples(str(folder / split / f"{shard}.tar"), written)
    (folder / split / "nshards.txt").write_text(str(shards))
    (folder / "classnames.txt").write_text("\n".join(images_by_class))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    return folder
