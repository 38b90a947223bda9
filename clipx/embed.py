"""`python -m clipx.embed run=… out=…`: the embeddings of a data source's images and of all their captions, in shards.

On any number of ranks, which share the shards; a run that was killed goes on when it is started again.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.config.saved import to_dict
from clipx.data.index import RETRY_S
from clipx.data.spec import Dataset, DataSpec, open_on_all_ranks
from clipx.distributed.spec import DistributedSpec
from clipx.errors import DataError, require
from clipx.evaluator.spec import EvaluatorSpec
from clipx.precision.spec import PrecisionSpec
from clipx.storage.local import acquire_lock
from clipx.storage.url import check_folder_url

if TYPE_CHECKING:
    from clipx.data.source import Source
    from clipx.distributed.comm import Comm
    from clipx.teacher.embedding_store import Place, Record, Writer


class Split(StrEnum):
    train = "train"
    held_out = "held_out"


class Format(StrEnum):
    npy = "npy"  # which teacher.embeddings reads
    parquet = "parquet"


class Stored(StrEnum):
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


@option("")
@dataclass(kw_only=True, slots=True)
class EmbedSpec:
    """Images are seen as by evaluation: as a rule the shorter side resized, the centre cut out."""

    kind: str = "embed"
    run: str = MISSING  # a model, as model.weights; of a run the moving average where one was kept
    out: str = MISSING  # a folder, or a URL of one
    split: Split = Split.train
    format: Format = Format.npy
    dtype: Stored = Stored.float32  # in which they are stored
    samples_per_shard: int = 50_000  # held in memory until the shard is written
    batch_size: int = 256  # images or captions embedded at a time
    retry_s: float = RETRY_S  # as data.retry_s, of a URL that is written to
    data: DataSpec | None = None  # null: the run's own
    precision: PrecisionSpec = MISSING
    distributed: DistributedSpec = MISSING
    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)  # come with data; typing one is an error

    def __post_init__(self) -> None:
        require(bool(self.out), "out= is empty: give a folder, or a URL of one")
        if "://" in self.out:
            check_folder_url("out", self.out)
        for key, number in (("samples_per_shard", self.samples_per_shard), ("batch_size", self.batch_size)):
            require(number >= 1, f"{key}={number} must be at least 1")
        require(self.retry_s >= 0, f"retry_s={self.retry_s} is negative: give 0, to try once, or more seconds")


def embed(spec: EmbedSpec) -> None:
    """Raises ConfigError where `out` holds embeddings of another model, of other data or of other options."""
    data = spec.data or _data_of(spec.run)
    comm = spec.distributed.build()
    try:
        _embed(spec, data, comm)
    finally:
        comm.close()


def _data_of(run: str) -> DataSpec:
    from clipx.trainer.saved_run import load_run

    require(
        (Path(run) / "config.yaml").is_file(), f"run={run} is no run directory, whose data could be taken: give data=…"
    )
    return load_run(Path(run)).data


def _embed(spec: EmbedSpec, data: DataSpec, comm: Comm) -> None:
    from clipx.data.loader import ImageView
    from clipx.teacher.embedding_store import VERSION, Place, Writer
    from clipx.teacher.live import frozen, weights_digest

    precision = spec.precision.build(comm.device)
    found, model_spec, model = frozen(spec.run, "run", comm.device, precision)
    source = _source(open_on_all_ranks(data, comm), spec.split, data)
    place = Place(spec.out, spec.retry_s)
    writer = Writer(
        model=model,
        device=comm.device,
        precision=precision,
        tokenizer=model_spec.text.build_tokenizer(),
        source=source,
        view=ImageView(model_spec.image.size, data.crop_scale, data.max_pixels, model_spec.image.stretch),
        samples_per_shard=spec.samples_per_shard,
        batch_size=spec.batch_size,
        parquet=spec.format is Format.parquet,
        dtype=spec.dtype,
        place=place,
    )
    plan = {
        "version": VERSION,
        "model": to_dict(model_spec),
        "weights": weights_digest(found.model),
        "scale": None if found.log_scale is None else math.exp(found.log_scale),
        "width": model.embed_dim,
        "precision": spec.precision.kind,
        "dtype": str(spec.dtype),
        "format": str(spec.format),
        "data": source.fingerprint,
        "split": str(spec.split),
        "samples": sum(source.sizes),
        "samples_per_shard": spec.samples_per_shard,
        "max_pixels": data.max_pixels,
        **({"min_caption_chars": data.min_caption_chars, "min_side": data.min_side} if spec.split == "train" else {}),
    }
    comm.require_equal(embeddings=plan)
    with _locked(place, comm):
        comm.run_on_main(lambda: _check_plan(place, plan))
        records = _written(writer, data, comm)
        comm.run_on_main(lambda: _finish(place, plan, records, data.max_bad_share))


def _source(dataset: Dataset, split: Split, data: DataSpec) -> Source:
    if split is Split.train:
        return dataset.train
    if dataset.held_out is None:
        raise DataError(f"split=held_out: data={data.name} holds out none: raise data.held_out_share, or embed train")
    return dataset.held_out


@contextlib.contextmanager
def _locked(place: Place, comm: Comm) -> Iterator[None]:
    """A folder is written by one command at a time; what a killed one left of a file is removed."""
    if place.folder is None:
        yield
        return
    folder = place.folder
    with (folder / ".lock").open("w") as lock:

        def begin() -> None:
            acquire_lock(lock, f"out={place.out}")
            for left in folder.glob(".*.*.*"):
                left.unlink()

        comm.run_on_main(begin)
        yield


def _check_plan(place: Place, plan: dict[str, Any]) -> None:
    from clipx.teacher.embedding_store import PLAN, put_json

    text = place.text(PLAN)
    if text is None:
        put_json(place, PLAN, plan)
        return
    before = json.loads(text)
    changed = [key for key in {**before, **plan} if before.get(key) != plan.get(key)]
    differences = ", ".join(f"{key} was {before.get(key)}, is {plan.get(key)}" for key in changed)
    require(
        not changed, f"out={place.out} holds other embeddings ({differences}): give another folder, or delete that one"
    )


def _written(writer: Writer, data: DataSpec, comm: Comm) -> list[Record]:
    """The records of all shards: those that are there already, and the others, which the ranks share."""
    from clipx.report.console import stdout_console
    from clipx.teacher.embedding_store import finished

    total, console = writer.shards(), stdout_console()
    found: dict[int, Record] = {}
    for part in comm.gather_objects(finished(writer.place, range(comm.rank, total, comm.world))):
        found |= part
    if found and comm.is_main:
        console.print(f"{len(found):,} of {total:,} shards are there from an earlier run")
    missing = [number for number in range(total) if number not in found]
    own = missing[comm.rank :: comm.world]
    written = {}
    for number, record in writer.write(own, data.workers, data.prefetch):
        written[number] = record
        if comm.is_main:
            console.print(f"{len(written):,} of {len(own):,} shards written by this rank", highlight=False)
    for part in comm.gather_objects(written):
        found |= part
    return [found[number] for number in range(total)]


def _finish(place: Place, plan: dict[str, Any], records: list[Record], max_bad_share: float) -> None:
    from clipx.report.console import stdout_console
    from clipx.teacher.embedding_store import MANIFEST, put_json

    bad = [item for record in records for item in record["bad"]]
    captions = sum(record["captions"] for record in records)
    if len(bad) > max_bad_share * plan["samples"] or not captions:
        key, reason = bad[0]
        raise DataError(
            f"{len(bad):,} of {plan['samples']:,} samples are bad, more than data.max_bad_share={max_bad_share}, the "
            f"first because {reason}: {key}"
        )
    put_json(place, MANIFEST, {**plan, "captions": captions, "bad": len(bad), "shards": records})
    console = stdout_console()
    console.print(
        f"{plan['samples'] - len(bad):,} images and {captions:,} captions in {len(records):,} shards, {len(bad):,} bad "
        f"samples: {place.out}",
        highlight=False,
    )
    if plan["format"] == "npy" and plan["split"] == "train" and place.folder is not None:
        console.print(f"learn from them with: objective=distillation teacher.embeddings={place.out}", markup=False)


main = cli(embed, "embed", unused=("evaluator",))

if __name__ == "__main__":
    main()
