"""Stores the embeddings of a data source in shards, which several processes can write in any order.

    out/embed.json          plan: what all shards depend on (model, weights, data, number formats); written first
        00000.image.npy     [n, D], one row per sample; NaN if the sample could not be read. [n, V, D] with V views
        00000.boxes.npy     [n, V, 4] int32, with views: left, top, right, bottom of each crop in pixels of the image
        00000.text.npy      [m, D], one row per caption: the captions of all samples, concatenated
        00000.captions.npy  [m] uint64, a hash of each caption
        00000.offsets.npy   [n + 1] int64: the captions of sample i are the rows from offsets[i] to offsets[i + 1]
        00000.json          record: size and SHA-256 of these files, and the bad samples; written last
        manifest.json       the plan and all records; written when all shards are complete

Row i of shard k is sample k * samples_per_shard + i of the source. In Parquet format, a shard is one file with one row
per sample and the columns index, key, image, captions and text. In WebDataset format, it is a tar (feature_shards.py).
The record of a shard is that of clipx/storage/part_store.py, with samples, captions and bad [[key, reason], …].
"""

from __future__ import annotations

import hashlib

PLAN, MANIFEST, VERSION = "embed.json", "manifest.json", 1


def npy_files(number: int) -> tuple[str, str, str, str]:
    """Returns the names of the files (image, text, captions, offsets) of a shard."""
    image, text, captions, offsets = (f"{number:05d}.{part}.npy" for part in ("image", "text", "captions", "offsets"))
    return image, text, captions, offsets


def boxes_file(number: int) -> str:
    """Returns the name of the file with the boxes of the views of a shard."""
    return f"{number:05d}.boxes.npy"


def caption_hash(caption: str) -> int:
    """Returns a 64-bit hash that identifies a caption among those of its sample."""
    return int.from_bytes(hashlib.blake2b(caption.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
