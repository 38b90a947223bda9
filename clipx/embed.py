"""`python -m clipx.embed run=… out=…`: the embeddings of a data source's images and of all their captions, in shards.

On any number of ranks, which share the shards; a run that was killed continues when it is started again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.data.shards.index import RETRY_S
from clipx.data.spec import DataSpec
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require
from clipx.evaluator.spec import EvaluatorSpec
from clipx.precision.spec import PrecisionSpec
from clipx.run.directory import RunDir
from clipx.storage.url import check_folder_url
from clipx.trainer.saved_run import load_run


class EmbedSplit(StrEnum):
    train = "train"
    held_out = "held_out"


class EmbeddingFormat(StrEnum):
    npy = "npy"  # which teacher.embeddings reads
    parquet = "parquet"


class EmbeddingDtype(StrEnum):
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
    split: EmbedSplit = EmbedSplit.train
    format: EmbeddingFormat = EmbeddingFormat.npy
    dtype: EmbeddingDtype = EmbeddingDtype.float32  # in which they are stored
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
    data = spec.data
    if data is None:
        run_dir = Path(spec.run)
        require(
            RunDir(run_dir).config.is_file(),
            f"run={spec.run} is no run directory, whose data could be taken: give data=…",
        )
        data = load_run(run_dir).data
    from clipx.teacher.embedding_writer import write_embeddings

    comm = spec.distributed.build()
    try:
        write_embeddings(spec, data, comm)
    finally:
        comm.close()


main = cli(embed, "embed", unused=("evaluator",))

if __name__ == "__main__":
    main()
