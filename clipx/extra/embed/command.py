"""`python -m clipx.embed run=… out=…`: embeds the images of a data source and their captions, and writes shards.

Runs on any number of ranks, which share the shards. A killed run continues when it is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum

from clipx.cli import cli, imports
from clipx.config.registry import MISSING, frozen, register
from clipx.data.shards.index import RETRY_S
from clipx.data.spec import SAMPLING_OPTIONS, VIEW_OPTIONS, DataSpec, check_effect
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError, require
from clipx.evaluator.spec import EvaluatorSpec, check_data
from clipx.model.tower_spec import timm_weights_of
from clipx.precision.spec import PrecisionSpec
from clipx.storage.url import check_folder_url
from clipx.trainer.saved_run import find_run
from clipx.weights.model_spec import UNUSED, WeightsModelSpec
from clipx.weights.spec import check_exists


class EmbedSplit(StrEnum):
    """Samples of a data source."""

    train = "train"
    """Training samples."""

    held_out = "held_out"
    """Held-out samples."""


class EmbeddingFormat(StrEnum):
    """File format of stored embeddings."""

    npy = "npy"
    """NumPy arrays, as teacher.embeddings reads them."""

    parquet = "parquet"
    """Parquet tables."""

    webdataset = "webdataset"
    """WebDataset shards of image features and captions, as data=webdataset reads them."""


class EmbeddedFeatures(StrEnum):
    """Features of an image."""

    embedding = "embedding"
    """The embedding, of unit norm."""

    trunk = "trunk"
    """The pooled features of the image tower before its projection."""


class EmbeddingDtype(StrEnum):
    """Number format of stored embeddings."""

    float16 = "float16"
    """2 bytes per number."""

    float32 = "float32"
    """4 bytes per number."""

    float64 = "float64"
    """8 bytes per number."""


@register("")
@frozen
class EmbedSpec(WeightsModelSpec):
    """Options of clipx.embed.

    Images are preprocessed as in evaluation: usually resized by the shorter side and cropped to the centre. With
    `views`, random crops are embedded instead.
    """

    kind: str = "embed"
    """Name of this command's options. The key itself cannot be set."""

    run: str = MISSING
    """Model that embeds: any value of model.weights; of a run, the moving average of its weights if it has one. With
    format=webdataset also an image tower alone: timm:NAME.TAG, or a folder or hf-hub:ORG/NAME of a timm model."""

    out: str = MISSING
    """Output folder, or its URL."""

    split: EmbedSplit = EmbedSplit.train
    """Samples to embed: `train` or `held_out`."""

    format: EmbeddingFormat = EmbeddingFormat.npy
    """File format: `npy`, which teacher.embeddings reads, `parquet`, or `webdataset`: image features and captions, on
    which model=stored_features trains a text tower. webdataset stores no text embeddings and leaves out bad samples."""

    features: EmbeddedFeatures = EmbeddedFeatures.embedding
    """Features of each image: `embedding`, or `trunk`, the pooled features of the image tower before its projection,
    which needs format=webdataset and is not available for model.kind=coca."""

    dtype: EmbeddingDtype = EmbeddingDtype.float32
    """Number format of the stored embeddings: `float16`, `float32` or `float64`."""

    image_size: int | None = None
    """Side of the images in pixels for an image tower of timm alone, at least 8; its positional embeddings are
    interpolated. null: the size of its weights. Another model has its own size."""

    views: int = 0
    """Number of random crops of each image that are embedded and stored with their boxes, at most batch_size: drawn
    with data.crop_scale and data.crop_ratio, and changed by data.augment. Training on them with these options cuts
    exactly these boxes and augments them alike. 0: one embedding of the image as in evaluation. Needs format=npy."""

    seed: int | None = None
    """Seed of the crops, at least 0. The crops of a sample depend on this seed, its number and its image, not on the
    model: equal for all teachers of an ensemble. null: 0. Needs views."""

    samples_per_shard: int = 50_000
    """Number of samples per output shard, at least 1. A shard is held in memory until it is written."""

    batch_size: int = 256
    """Number of images or captions embedded at a time, at least 1."""

    retry_s: float = RETRY_S
    """Seconds for which a failed request to the URL `out` is retried before the run ends. 0: a single attempt."""

    data: DataSpec | None = None
    """Data to embed. null: the data of the run."""

    precision: PrecisionSpec = MISSING
    """Number format of the towers."""

    distributed: DistributedSpec = MISSING
    """Processes and devices."""

    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)
    """Unused: options of the group data select evaluators. Setting it is an error."""

    def __post_init__(self) -> None:
        WeightsModelSpec.__post_init__(self)
        require(bool(self.out), "out= is empty: give a folder, or a URL of one")
        if "://" in self.out:
            check_folder_url("out", self.out)
        require(
            self.features is EmbeddedFeatures.embedding or self.format is EmbeddingFormat.webdataset,
            f"features={self.features} needs format=webdataset, not {self.format}: give it, or remove features",
        )
        for key, number in (("samples_per_shard", self.samples_per_shard), ("batch_size", self.batch_size)):
            require(number >= 1, f"{key}={number} must be at least 1")
        self._check_timm()
        self._check_views()
        # The data of a run, by data=null, may have these options.
        check_effect(self.data, SAMPLING_OPTIONS if self.views else (*SAMPLING_OPTIONS, *VIEW_OPTIONS), "embeddings")
        require(self.retry_s >= 0, f"retry_s={self.retry_s} is negative: give 0 for a single attempt, or more seconds")

    def _check_timm(self) -> None:
        name, webdataset = timm_weights_of(self.run), self.format is EmbeddingFormat.webdataset
        require(name != "", f"run={self.run} names no model: give timm:NAME or timm:NAME.TAG")
        require(
            name is None or webdataset,
            f"run={self.run} has no text tower, which format={self.format} needs: give format=webdataset",
        )
        if self.image_size is not None:
            require(self.image_size >= 8, f"image_size={self.image_size} is too small: give at least 8 pixels")
            require(
                webdataset,
                f"image_size={self.image_size} has no effect with format={self.format}: give format=webdataset and an "
                "image tower of timm",
            )

    def _check_views(self) -> None:
        require(
            0 <= self.views <= self.batch_size,
            f"views={self.views} must be in [0, {self.batch_size}]: the crops of an image are embedded in one batch of "
            "batch_size; 10 to 30 are usual",
        )
        require(
            not self.views or self.format is EmbeddingFormat.npy,
            f"views={self.views} needs format=npy, not {self.format}: remove one of them",
        )
        require(
            self.seed is None or self.views > 0,
            f"seed={self.seed} has no effect without views: give views, or remove it",
        )
        require((self.seed or 0) >= 0, f"seed={self.seed} must be at least 0")


def embed(spec: EmbedSpec, changes: Sequence[str] = ()) -> None:
    """Writes the embeddings. Collective. `changes`: overrides of the run's data.

    Raises ConfigError if `out` contains embeddings of another model, other data or other options.
    """
    data, seed = spec.data, 0
    if data is None:
        saved = find_run(spec.run, changes)
        if saved is None:
            raise ConfigError(f"run={spec.run} is not a run and has no data: give data=…")
        data, seed = saved.spec.data, saved.spec.seed
    else:
        require(
            not data.mismatched,
            f"data.mismatched={data.mismatched} is a function of the seed of a run: remove it, or embed the data of a "
            "run by run=… without data=…",
        )
    check_data(data, {}, files=spec.distributed.check_launch().world == 1, trains=True)
    check_exists(spec.run, "run")
    with imports():
        from clipx.extra.embed.writer import write_embeddings

    with spec.distributed.joined() as comm:
        write_embeddings(spec, data, seed, comm)


main = cli(embed, "embed", unused=("evaluator", *UNUSED), of_run=("data",))

if __name__ == "__main__":
    main()
