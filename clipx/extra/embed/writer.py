"""Embeds a data source with a trained model and writes the shards of an embedding store, distributed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clipx.config.saved import to_dict
from clipx.data.images import Crops, ImageReader, reader_of
from clipx.data.loader import EvalBatch, eval_loader
from clipx.data.npy import save_array
from clipx.data.shards.index import RETRY_S
from clipx.data.source import BadRecord, Source
from clipx.data.spec import Classes, Dataset, DataSpec, exchange_captions, open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.distributed.parts import Parts, locked, write_missing
from clipx.errors import DataError, require, require_effect
from clipx.extra.embed.feature_shards import shard_file, usage, write_classes, write_shard
from clipx.extra.embed.image_model import load_image_model
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.model.tokenizer import Tokenizer
from clipx.precision.spec import Precision
from clipx.report.console import Progress, stdout_console
from clipx.storage.part_store import PartStore, Record, record_file
from clipx.teacher.live import weights_digest
from clipx.teacher.stored import MANIFEST, PLAN, VERSION, boxes_file, caption_hash, npy_files
from clipx.weights.load import LoadedWeights, load_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clipx.extra.embed.command import EmbedSpec

_SEED = 0  # of the crops

Files = dict[str, list[Any]]
"""{name: [bytes, SHA-256]}"""


def write_embeddings(spec: EmbedSpec, data: DataSpec, seed: int, comm: Comm) -> None:
    """Embeds a split of `data`, as a run with this seed reads it, and writes it to `spec.out`. Collective.

    Continues an interrupted run. Raises ConfigError if `spec.out` holds embeddings with another plan, and DataError if
    too many samples are bad.
    """
    if spec.data is not None:  # else those of the machine on which the run was trained
        warn_of_few_cores("data.workers", spec.data.loader_processes(comm.sharing), comm.rank)
    precision = spec.number_format.build(comm.device)
    weights, model_spec, model = _load(spec, comm.device, precision.dtype)
    require(
        spec.features == "embedding" or model_spec.has_pooled_trunk,
        f"features={spec.features} is not available for model.kind={model_spec.kind}, which pools the tokens of the "
        "trunk itself: remove it",
    )
    require(
        not spec.views or "crop_scale" in model_spec.image.kind.data_options,
        f"views={spec.views} crops images, and run={spec.run} has {model_spec.image.kind.option}: remove it",
    )
    dataset = exchange_captions(open_on_all_ranks(data, comm), data, seed)
    source = _source(dataset, spec.split, data)
    store = PartStore(spec.out, RETRY_S)
    reader, tokenizer = reader_of(model_spec.image, data).for_model(model), model_spec.text.build_tokenizer()
    parts = Parts(sum(source.sizes), spec.samples_per_shard, spec.batch_size // max(1, spec.views))
    crops = Crops(spec.views, _SEED) if spec.views else None
    writer = EmbeddingWriter(spec, model, comm.device, precision, tokenizer, source, reader, parts, store, crops)
    plan = {
        "version": VERSION,
        "model": to_dict(model_spec),
        "weights": weights_digest(weights.model),
        "scale": None if weights.log_scale is None else math.exp(weights.log_scale),
        "width": writer.width,
        "precision": spec.number_format.on(comm.device).kind,
        "dtype": str(spec.dtype),
        "format": str(spec.format),
        "data": source.fingerprint,
        "split": str(spec.split),
        "samples": sum(source.sizes),
        "samples_per_shard": spec.samples_per_shard,
        "max_pixels": data.max_pixels,
        **({"features": str(spec.features)} if spec.format == "webdataset" else {}),
        **({"min_caption_chars": data.min_caption_chars, "min_side": data.min_side} if spec.split == "train" else {}),
        **({"mismatched": [data.mismatched, seed]} if data.mismatched else {}),
        **_views(writer.crops, data),
    }
    comm.require_equal(embeddings=plan)
    with locked(store, comm):
        comm.run_on_main(lambda: store.check_plan(PLAN, plan, "embeddings"))
        workers = data.loader_processes(comm.sharing)
        progress = Progress(shown=comm.is_main, name=f"embedding {data.name}")
        write = partial(writer.write, workers=workers, prefetch=data.prefetch, progress=progress)
        records = write_missing(store, len(writer.parts), write, comm, "shards")
        classes = dataset.classes if spec.format == "webdataset" else None
        comm.run_on_main(lambda: _finish(store, plan, records, data.max_bad_share, classes))


def _load(spec: EmbedSpec, device: torch.device, dtype: torch.dtype) -> tuple[LoadedWeights, ModelSpec, CLIP]:
    """Loads the model of `spec.run`, or an image tower alone. Raises ClipxError."""
    if spec.format == "webdataset":
        found = load_image_model(spec.run, "run", spec.image_size, device, dtype)
        if found is not None:
            spec.check_unused(f"run={spec.run}")
            return found
    given = f"image_size={spec.image_size}"
    require_effect(spec.image_size is None, given, f"with run={spec.run}, which is not an image tower of timm alone")
    return load_model(spec.run, "run", device, dtype, spec)


def _views(crops: Crops | None, data: DataSpec) -> dict[str, Any]:
    """Returns the part of the plan about the views."""
    if crops is None:
        return {}
    options = data.view_options()
    area = options.pop("crop_scale")
    plan = {"views": crops.count, "views_seed": crops.seed, "crop_scale": area}
    return {**plan, "view_options": options} if options else plan


def _source(dataset: Dataset, split: str, data: DataSpec) -> Source:
    if split == "train":
        return dataset.train
    if dataset.held_out is None:
        raise DataError(
            f"split=held_out: data={data.name} has no held-out samples: raise data.held_out_share, or use split=train"
        )
    return dataset.held_out


def _finish(
    store: PartStore, plan: dict[str, Any], records: list[Record], max_bad_share: float, classes: Classes | None
) -> None:
    """Writes the class names and the manifest, and prints a summary. Raises DataError if too many samples are bad."""
    bad = [item for record in records for item in record["bad"]]
    captions = sum(record["captions"] for record in records)
    if len(bad) > max_bad_share * plan["samples"] or not captions:
        key, reason = bad[0]
        raise DataError(
            f"{len(bad):,} of {plan['samples']:,} samples are bad, more than data.max_bad_share={max_bad_share}; the "
            f"first: {key}: {reason}"
        )
    class_files = write_classes(store, classes)
    store.put_json(MANIFEST, {**plan, "captions": captions, "bad": len(bad), "shards": records})
    console = stdout_console()
    in_views = f" in {plan['views']} views" if "views" in plan else ""
    console.print(
        f"{plan['samples'] - len(bad):,} images{in_views} and {captions:,} captions in {len(records):,} shards, "
        f"{len(bad):,} bad samples: {store.out}"
    )
    if plan["format"] == "npy" and plan["split"] == "train" and store.folder is not None:
        options = {"crop_scale": plan["crop_scale"], **plan.get("view_options", {})} if in_views else {}
        crops = "".join(f" data.{key}={str(value).replace(' ', '')}" for key, value in options.items())
        line = f"distill from them: objective=distillation teacher.embeddings={store.out}{crops}"
        console.print(line)
    if plan["format"] == "webdataset":
        labels = sum(record["labels"] for record in records) == plan["samples"] - len(bad)
        line = usage(store.out, plan["split"], plan["width"], labels, class_files)
        console.print(line)


@dataclass(slots=True)
class ShardEmbeddings:
    """Embeddings of the samples of a shard. The lists but `text_mD` and `bad` have one item per sample of `samples`.

    An item of `image` is [D], or [V, D] with V views, whose boxes are in `boxes`, [V, 4].
    """

    samples: range
    image: list[Tensor | None] = field(default_factory=list)
    boxes: list[Tensor | None] = field(default_factory=list)
    captions: list[Sequence[str]] = field(default_factory=list)
    labels: list[int | str | None] = field(default_factory=list)
    text_mD: list[Tensor] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.samples)
        self.image, self.boxes, self.captions, self.labels = [None] * n, [None] * n, [()] * n, [None] * n


@dataclass(frozen=True, slots=True)
class EmbeddingWriter:
    """Embeds the samples of a source with the evaluation transform, or `crops` of each, and writes them.

    `parts`: the shards, and batches of them.
    """

    spec: EmbedSpec
    model: CLIP
    device: torch.device
    precision: Precision
    tokenizer: Tokenizer
    source: Source
    reader: ImageReader
    parts: Parts
    store: PartStore
    crops: Crops | None

    @property
    def trunk(self) -> bool:
        """Returns whether the features before the projection are written instead of the image embedding."""
        return self.spec.features == "trunk"

    @property
    def width(self) -> int:
        """Number of features of an image."""
        return self.model.trunk_width if self.trunk else self.model.embed_dim

    def write(
        self, numbers: Sequence[int], of: Sequence[int], workers: int, prefetch: int, progress: Progress
    ) -> Iterator[tuple[int, Record]]:
        """Writes these shards, among those `of` that all ranks write. Yields (number, record) of each complete one."""
        batches = [part for number in numbers for part in self.parts.batches(number)]
        loaded = eval_loader(self.source, self.reader, batches, workers, prefetch, crops=self.crops)
        total = sum(len(self.parts.samples(number)) for number in of)
        with progress.share(loaded, batches, total, "samples") as embedded:
            for number in numbers:
                shard = ShardEmbeddings(self.parts.samples(number))
                for _ in self.parts.batches(number):
                    self._embed(next(embedded), shard)
                yield number, self._put(number, shard)

    @torch.inference_mode()
    def _embed(self, batch: EvalBatch, shard: ShardEmbeddings) -> None:
        shard.bad += batch.bad
        if not batch.index:
            return
        encode = self.model.encode_trunk if self.trunk else self.model.encode_image
        image = self._call(encode, batch.image.whole(self.device))
        image = image if self.crops is None else image.unflatten(0, (-1, self.crops.count))
        for index, row, captions, label in zip(batch.index, image, batch.captions, batch.labels, strict=True):
            place = index - shard.samples.start
            shard.image[place], shard.captions[place], shard.labels[place] = row, captions, label
        if batch.boxes is not None:
            for index, boxes_V4 in zip(batch.index, batch.boxes, strict=True):
                shard.boxes[index - shard.samples.start] = boxes_V4
        if self.spec.format == "webdataset":
            return
        texts = [caption for captions in batch.captions for caption in captions]
        for at in range(0, len(texts), self.spec.batch_size):
            tokens_bL = self.tokenizer(texts[at : at + self.spec.batch_size])
            shard.text_mD.append(self._call(self.model.encode_text, tokens_bL.to(self.device)))

    def _call(self, encode: Callable[[Any], Tensor], batch: Any) -> Tensor:
        with self.precision.autocast():
            return encode(batch).cpu()

    def _put(self, number: int, shard: ShardEmbeddings) -> Record:
        put = self._put_features if self.spec.format == "webdataset" else self._put_both
        record = put(number, shard)
        record |= {"samples": len(shard.samples), "bad": [[bad.key, bad.reason] for bad in shard.bad]}
        self.store.put_json(record_file(number), record)
        return record

    def _put_features(self, number: int, shard: ShardEmbeddings) -> Record:
        samples = [
            (index, row.numpy().astype(self.spec.dtype), captions, label)
            for index, row, captions, label in zip(
                shard.samples, shard.image, shard.captions, shard.labels, strict=True
            )
            if row is not None
        ]
        name = shard_file(number)
        return {
            "captions": sum(len(captions) for _, _, captions, _ in samples),
            "labels": sum(label is not None for *_, label in samples),
            "files": {name: self.store.put(name, write_shard(samples))},
        }

    def _put_both(self, number: int, shard: ShardEmbeddings) -> Record:
        views = () if self.crops is None else (self.crops.count,)
        missing = torch.full((*views, self.model.embed_dim), torch.nan)
        rows = torch.stack([missing if row is None else row for row in shard.image])
        text_mD = torch.cat([*shard.text_mD, torch.empty(0, self.model.embed_dim)])
        image, text = (x.numpy().astype(self.spec.dtype) for x in (rows, text_mD))
        put = self._put_parquet if self.spec.format == "parquet" else self._put_npy
        return {"captions": len(text), "files": put(number, shard, image, text)}

    def _put_npy(self, number: int, shard: ShardEmbeddings, image: NDArray[Any], text: NDArray[Any]) -> Files:
        hashes = [caption_hash(caption) for captions in shard.captions for caption in captions]
        arrays = (image, text, np.array(hashes, dtype=np.uint64), _offsets(shard))
        files = dict(zip(npy_files(number), arrays, strict=True))
        if self.crops is not None:
            missing_V4 = torch.zeros((self.crops.count, 4), dtype=torch.int32)
            boxes = torch.stack([missing_V4 if row is None else row for row in shard.boxes])
            files[boxes_file(number)] = boxes.numpy()
        return {name: self.store.put(name, partial(save_array, array=array)) for name, array in files.items()}

    def _put_parquet(self, number: int, shard: ShardEmbeddings, image: NDArray[Any], text: NDArray[Any]) -> Files:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def vectors(rows: NDArray[Any], missing: Any = None) -> Any:
            return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), self.model.embed_dim, mask=missing)

        missing = pa.array([row is None for row in shard.image])
        table = pa.table(
            {
                "index": pa.array(shard.samples, pa.int64()),
                "key": pa.array([self.source.key(index) for index in shard.samples]),
                "image": vectors(image, missing),
                "captions": pa.array(shard.captions, pa.list_(pa.string())),
                "text": pa.ListArray.from_arrays(pa.array(_offsets(shard), pa.int32()), vectors(text)),
            }
        )
        name = f"{number:05d}.parquet"
        return {name: self.store.put(name, lambda path: pq.write_table(table, path, use_dictionary=False))}


def _offsets(shard: ShardEmbeddings) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, shard.captions)], dtype=np.int64)
