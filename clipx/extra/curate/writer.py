"""Writes the scores of a data set in parts, distributed over the ranks, and joins them into one table.

out/score.json            plan: what all parts depend on (scores, data, model); written first
    00000.parquet         scores of the samples of part 0, a row each
    00000.signatures.npy  SIGNATURE of its usable images, for `duplicates`
    00000.embeddings.npy  [n, D] float16, an embedding for each row, for `semantic`; NaN of an unusable image
    00000.json            record: sizes and hashes of these files; written last
    scores.parquet        all parts, a row group each, with the columns that depend on all samples
    entries.parquet       entries of the metadata list with the number of samples that match each, for `entries`
    manifest.json         the plan and all records
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipx.config.saved import to_dict
from clipx.data.images import ImageReader, reader_of
from clipx.data.inputs import Inputs
from clipx.data.loader_pool import load
from clipx.data.npy import read_npz, save_array
from clipx.data.selection.files import INDEXED
from clipx.data.shards.index import RETRY_S
from clipx.data.source import Source, whole_index
from clipx.data.spec import DataSpec, exchange_captions, open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.distributed.parts import Parts, locked, write_missing
from clipx.errors import CheckpointError, DataError
from clipx.extra.curate.entries import Entries, read_entries
from clipx.extra.curate.samples import Row, ScoredBatch, ScoredBatches
from clipx.extra.curate.score import OF_MODEL, Score
from clipx.extra.curate.score_table import entry_counts
from clipx.extra.look.duplicates import NEAR_BITS
from clipx.model.clip import CLIP
from clipx.model.tokenizer import Tokenizer
from clipx.precision.spec import Precision
from clipx.report.console import Progress, stdout_console
from clipx.storage.part_store import PartStore, Record, record_file
from clipx.teacher.live import weights_digest
from clipx.weights.files import read_tensors
from clipx.weights.load import load_model

if TYPE_CHECKING:
    from clipx.extra.curate.score import ScoreSpec

PLAN, TABLE, ENTRIES, MANIFEST, VERSION = "score.json", "scores.parquet", "entries.parquet", "manifest.json", 1

_COLUMNS: dict[Score, dict[str, pa.DataType]] = {
    Score.similarity: {"similarity": pa.float32()},
    Score.aesthetic: {"aesthetic": pa.float32()},
    Score.caption: {**{name: pa.int32() for name in ("captions", "characters", "words")}, "script": pa.string()},
    Score.image: {
        **{name: pa.int32() for name in ("width", "height", "shorter_side")},
        **{name: pa.float32() for name in ("aspect_ratio", "entropy")},
    },
    Score.entries: {"entries": pa.list_(pa.int32())},
}


@dataclass(frozen=True, slots=True)
class LinearHead:
    """score_B = embeddings_BD · weight_D + bias."""

    weight_D: Tensor
    bias: float

    def __call__(self, image_BD: Tensor) -> Tensor:
        return image_BD.double() @ self.weight_D + self.bias


def load_head(file: str, width: int) -> LinearHead:
    """Reads the head of embeddings of `width` numbers. Raises DataError."""
    tensors = _tensors(file)
    found = {name: [value for key, value in tensors.items() if key.endswith(name)] for name in ("weight", "bias")}
    for name, values in found.items():
        if len(values) != 1:
            raise DataError(
                f"head={file} holds {len(values)} tensors whose names end in {name}, of {', '.join(sorted(tensors))}: "
                "give one weight and one bias"
            )
    weight, bias = (values[0].double().flatten() for values in found.values())
    if len(weight) != width or len(bias) != 1:
        raise DataError(
            f"head={file} has a weight of {len(weight)} and a bias of {len(bias)} numbers: the embeddings of run= have "
            f"{width} dimensions, give {width} and 1"
        )
    if not bool(torch.isfinite(torch.cat([weight, bias])).all()):
        raise DataError(f"head={file} has numbers that are not finite: give another file")
    return LinearHead(weight, float(bias))


def _tensors(file: str) -> Mapping[str, Tensor]:
    path, fix = Path(file).expanduser(), "give a .safetensors, .pt or .npz file"
    try:
        if path.suffix != ".npz":
            return read_tensors(path)[0]
        arrays = read_npz(path, f"head={file}", fix)
        return {name: torch.from_numpy(array.astype(np.float64)) for name, array in arrays.items()}
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        raise DataError(f"head={file} cannot be read ({error}): {fix}") from None


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model with what its scores need."""

    model: CLIP
    tokenizer: Tokenizer
    reader: ImageReader
    precision: Precision
    device: torch.device
    head: LinearHead | None
    batch_size: int

    @torch.inference_mode()
    def image(self, batch: Inputs) -> Tensor:
        """Returns the embeddings [m, D] of unit norm, on the host."""
        return self._call(self.model.encode_image, batch.whole(self.device))

    @torch.inference_mode()
    def similarities(self, image_mD: Tensor, captions: Sequence[Sequence[str]]) -> list[float]:
        """Returns for each image the mean cosine with its captions."""
        texts = [caption for own in captions for caption in own]
        owner = torch.tensor([row for row, own in enumerate(captions) for _ in own])
        cosines = list[Tensor]()
        for at in range(0, len(texts), self.batch_size):
            tokens_bL = self.tokenizer(texts[at : at + self.batch_size]).to(self.device)
            text_bD = self._call(self.model.encode_text, tokens_bL)
            cosines.append((image_mD[owner[at : at + self.batch_size]].double() * text_bD.double()).sum(1))
        sums = torch.zeros(len(captions), dtype=torch.float64).index_add_(0, owner, torch.cat(cosines))
        found: list[float] = (sums / torch.bincount(owner, minlength=len(captions))).tolist()
        return found

    def _call(self, encode: Callable[[Any], Tensor], batch: Any) -> Tensor:
        with self.precision.autocast():
            return encode(batch).cpu()


def write_scores(spec: ScoreSpec, data: DataSpec, comm: Comm) -> None:
    """Writes the scores of the training samples of `data` to `spec.out`. Continues an interrupted command. Collective.

    Raises ConfigError if `spec.out` holds scores with another plan, DataError if no sample is usable.
    """
    workers = data.loader_processes(comm.sharing)
    warn_of_few_cores("data.workers", workers, comm.rank)
    entries = None if spec.entries is None else read_entries(spec.entries)
    encoder, described = _encoder(spec, data, comm)
    dataset = exchange_captions(open_on_all_ranks(data, comm), data, spec.seed)
    writer = ScoreWriter(spec, data, dataset.train, encoder, entries, PartStore(spec.out, RETRY_S))
    plan = {
        "version": VERSION,
        "scores": sorted(map(str, spec.scores)),
        "data": dataset.train.fingerprint,
        "samples": sum(dataset.train.sizes),
        "samples_per_part": spec.samples_per_shard,
        "limits": [data.max_pixels, data.min_caption_chars, data.min_side],
        "mismatched": [data.mismatched, spec.seed] if data.mismatched else None,
        "near_bits": NEAR_BITS if Score.duplicates in spec.scores else None,
        "entries": None if entries is None else entries.digest,
        "clusters": [spec.clusters, spec.seed] if Score.semantic in spec.scores else None,
        **described,
    }
    comm.require_equal(scores=plan)
    with locked(writer.store, comm):
        comm.run_on_main(lambda: writer.store.check_plan(PLAN, plan, "scores"))
        progress = Progress(shown=comm.is_main, name=f"scoring {data.name}")
        write = partial(writer.write, workers=workers, progress=progress)
        records = write_missing(writer.store, len(writer.parts), write, comm, "parts")
        comm.run_on_main(lambda: _finish(writer, plan, records, comm.device))


def _encoder(spec: ScoreSpec, data: DataSpec, comm: Comm) -> tuple[Encoder | None, dict[str, Any]]:
    """Returns the model of the scores, or None, and its part of the plan. Raises CheckpointError or DataError."""
    if spec.run is None:
        return None, {}
    precision = spec.number_format.build(comm.device)
    weights, model_spec, model = load_model(spec.run, "run", comm.device, precision.dtype, spec)
    head = None if spec.head is None else load_head(spec.head, model.embed_dim)
    reader = reader_of(model_spec.image, data).for_model(model)
    tokenizer = model_spec.text.build_tokenizer()
    encoder = Encoder(model, tokenizer, reader, precision, comm.device, head, spec.batch_size)
    return encoder, {
        "model": to_dict(model_spec),
        "weights": weights_digest(weights.model),
        "precision": spec.number_format.on(comm.device).kind,
        "head": None if head is None else hashlib.sha256(head.weight_D.numpy().tobytes()).hexdigest() + f"/{head.bias}",
    }


@dataclass(frozen=True, slots=True)
class ScoreWriter:
    """Scores the samples of a source and writes the parts."""

    spec: ScoreSpec
    data: DataSpec
    source: Source
    encoder: Encoder | None
    entries: Entries | None
    store: PartStore

    @property
    def parts(self) -> Parts:
        return Parts(sum(self.source.sizes), self.spec.samples_per_shard, self.spec.batch_size)

    def write(
        self, numbers: Sequence[int], of: Sequence[int], workers: int, progress: Progress
    ) -> Iterator[tuple[int, Record]]:
        """Writes these parts, among those `of` that all ranks write. Yields (number, record) of each complete one."""
        batches = [batch for number in numbers for batch in self.parts.batches(number)]
        reader = None if self.encoder is None else self.encoder.reader
        measured = ScoredBatches(self.source, reader, self.entries, self.spec.scores, self.data.max_pixels)
        loaded: Iterable[ScoredBatch] = load(None, measured, batches, workers=workers, ready=self.data.prefetch)
        total = sum(len(self.parts.samples(number)) for number in of)
        with progress.share(loaded, batches, total, "samples") as scored:
            for number in numbers:
                yield number, self._put(number, [self._complete(next(scored)) for _ in self.parts.batches(number)])

    def _complete(self, batch: ScoredBatch) -> tuple[Sequence[Row], dict[str, NDArray[Any]]]:
        """Returns the rows of a batch, with the scores of the model, and the arrays of the part by name.

        The embedding of an unusable sample is NaN.
        """
        scores, arrays = self.spec.scores, dict[str, NDArray[Any]]()
        if Score.duplicates in scores:
            arrays["signatures"] = batch.signatures
        if self.encoder is None:
            return batch.rows, arrays
        usable = [place for place, row in enumerate(batch.rows) if "reason" not in row]
        embeddings = np.full((len(batch.rows), self.encoder.model.embed_dim), np.nan, np.float16)
        if batch.image is not None:
            image_mD, rows = self.encoder.image(batch.image), [batch.rows[place] for place in usable]
            embeddings[usable] = image_mD.numpy()
            if Score.similarity in scores:
                for row, similarity in zip(rows, self.encoder.similarities(image_mD, batch.captions), strict=True):
                    row["similarity"] = similarity
            if self.encoder.head is not None:
                for row, aesthetic in zip(rows, self.encoder.head(image_mD).tolist(), strict=True):
                    row["aesthetic"] = aesthetic
        if Score.semantic in scores:
            arrays["embeddings"] = embeddings
        return batch.rows, arrays

    def _put(self, number: int, batches: Sequence[tuple[Sequence[Row], dict[str, NDArray[Any]]]]) -> Record:
        """Writes a part of the rows and arrays of its batches."""
        samples, rows = self.parts.samples(number), [row for found, _ in batches for row in found]
        reasons = [row.get("reason") for row in rows]
        columns: dict[str, pa.Array] = {
            "index": pa.array([whole_index(self.source, index) for index in samples], pa.int64()),
            "key": pa.array([_text(self.source.key(index)) for index in samples], pa.string()),
            "reason": pa.array([None if reason is None else _text(str(reason)) for reason in reasons], pa.string()),
        }
        for score, types in _COLUMNS.items():
            if score in self.spec.scores:
                columns |= {name: pa.array([row.get(name) for row in rows], kind) for name, kind in types.items()}
        table = pa.table(columns, metadata={INDEXED: b"1"})
        name = f"{number:05d}"
        files = {f"{name}.parquet": self.store.put(f"{name}.parquet", lambda path: pq.write_table(table, path))}
        for kind in batches[0][1]:
            array = np.concatenate([arrays[kind] for _, arrays in batches])
            file = f"{name}.{kind}.npy"
            files[file] = self.store.put(file, partial(save_array, array=array))
        record = {"samples": len(samples), "usable": reasons.count(None), "files": files}
        self.store.put_json(record_file(number), record)
        return record


def _finish(writer: ScoreWriter, plan: dict[str, Any], records: list[Record], device: torch.device) -> None:
    """Joins the parts with the columns that depend on all samples, and prints a summary. Raises DataError."""
    from clipx.extra.curate.groups import duplicate_columns, semantic_columns

    store, usable = writer.store, sum(record["usable"] for record in records)
    if not usable:
        raise DataError(
            f"none of the {plan['samples']:,} samples is usable: see the column reason of {store.out}/*.parquet"
        )
    numbers = range(len(records))
    joined = dict[str, pa.Array]()
    whole = np.concatenate([store_table(store, number, ["index"])["index"].to_numpy() for number in numbers])
    if Score.duplicates in writer.spec.scores:
        found = np.concatenate([store_array(store, f"{number:05d}.signatures.npy") for number in numbers])
        joined |= duplicate_columns(found, whole)
    if Score.semantic in writer.spec.scores:
        image_ND = np.concatenate([store_array(store, f"{number:05d}.embeddings.npy") for number in numbers])
        joined |= semantic_columns(image_ND, writer.spec.clusters, writer.spec.seed, device)

    schema = store_table(store, 0).schema
    for name, column in joined.items():
        schema = schema.append(pa.field(name, column.type))

    def write(path: str) -> None:
        start = 0
        with pq.ParquetWriter(path, schema) as output:
            for number in numbers:
                table = store_table(store, number)
                for name, column in joined.items():
                    table = table.append_column(name, column.slice(start, len(table)))
                start += len(table)
                output.write_table(table, row_group_size=len(table))

    files = {TABLE: store.put(TABLE, write)}
    if writer.entries is not None:
        counted = _count_entries(store, numbers, writer.entries)
        files[ENTRIES] = store.put(ENTRIES, partial(pq.write_table, counted))
    store.put_json(MANIFEST, {**plan, "usable": usable, "files": files, "parts": records})
    console = stdout_console()
    names = ", ".join(pa_name for score in _COLUMNS if score in writer.spec.scores for pa_name in _COLUMNS[score])
    console.print(
        f"{usable:,} of {plan['samples']:,} samples scored, {plan['samples'] - usable:,} unusable: {store.out}/{TABLE}"
    )
    console.print(f"columns: {', '.join(filter(None, ('index, key, reason', names, *joined)))}")
    if plan["scores"] and not set(writer.spec.scores) & set(OF_MODEL) and usable < plan["samples"]:
        console.print("the column reason has the fault of each unusable sample")


def _count_entries(store: PartStore, numbers: Sequence[int], entries: Entries) -> pa.Table:
    """Returns a row for each entry, in the order of its number: its text and the number of samples that match it."""
    lists = (chunk for number in numbers for chunk in store_table(store, number, ["entries"])["entries"].chunks)
    counts = entry_counts(lists, len(entries.texts))
    matched = f"{int((counts > 0).sum()):,} of {len(entries.numbers):,} entries are matched"
    unused = len(entries.texts) - len(entries.numbers)
    matched += f", {unused:,} further ones are empty or repeated" if unused else ""
    stdout_console().print(f"{matched}: {store.out}/{ENTRIES}")
    return pa.table({"entry": pa.array(map(_text, entries.texts), pa.string()), "count": counts})


def store_table(store: PartStore, number: int, columns: list[str] | None = None) -> pa.Table:
    """Returns the table of a part, or some of its columns."""
    return pq.read_table(pa.BufferReader(store.read_bytes(f"{number:05d}.parquet")), columns=columns)


def store_array(store: PartStore, name: str) -> NDArray[Any]:
    """Returns an array of a part."""
    import io

    array: NDArray[Any] = np.load(io.BytesIO(store.read_bytes(name)), allow_pickle=False)
    return array


def _text(text: str) -> str:
    """Returns a text that UTF-8 can represent."""
    return text.encode("utf-8", "backslashreplace").decode()
