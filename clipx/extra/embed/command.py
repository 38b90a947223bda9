"""`python -m clipx.embed run=… out=…`: embeds the images of a data source and their captions, and writes shards.

Runs on any number of ranks, which share the shards. A killed run continues when it is started again.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from clipx.cli import cli, imports
from clipx.command_spec import UNUSED, ShardsCommandSpec
from clipx.config.registry import frozen, option, register
from clipx.data.spec import SAMPLING_OPTIONS, VIEW_OPTIONS, check_effect
from clipx.errors import ConfigError, require
from clipx.evaluator.spec import check_data
from clipx.model.tower_spec import timm_weights_of
from clipx.trainer.saved_run import find_run
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
class EmbedSpec(ShardsCommandSpec):
    """Options of clipx.embed.

    With format=webdataset `run` is also an image tower alone: timm:NAME.TAG, or a folder or hf-hub:ORG/NAME of a model
    of timm.

    Images are preprocessed as in evaluation: usually resized by the shorter side and cropped to the centre. With
    `views`, random crops are embedded instead.
    """

    kind: str = "embed"
    """Name of this command's options. The key itself cannot be set."""

    split: EmbedSplit = EmbedSplit.train
    """Samples to embed: `train` or `held_out`."""

    format: EmbeddingFormat = EmbeddingFormat.npy
    """File format: `npy`, which teacher.embeddings reads, `parquet`, or `webdataset`: image features and captions, on
    which model=stored_features trains a text tower. webdataset stores no text embeddings and leaves out bad samples."""

    features: EmbeddedFeatures = option(EmbeddedFeatures.embedding, when="format == webdataset")
    """Features of each image: `embedding`, or `trunk`, the pooled features of the image tower before its projection,
    which is not available for model.kind=coca."""

    dtype: EmbeddingDtype = EmbeddingDtype.float32
    """Number format of the stored embeddings: `float16`, `float32` or `float64`."""

    image_size: int | None = option(None, ge=8, unit="pixels", when="format == webdataset")
    """Side of the images for an image tower of timm alone; its positional embeddings are interpolated. null: the size
    of its weights. Another model has its own size."""

    views: int = option(0, ge=0, when="format == npy")
    """Number of random crops of each image that are embedded and stored with their boxes, at most batch_size: drawn
    with data.crop_scale and data.crop_ratio, and changed by data.augment. Training on them with these options cuts
    exactly these boxes and augments them alike. The crops of a sample depend on its number and its image, not on the
    model: equal for all teachers of an ensemble. 0: one embedding of the image as in evaluation."""

    changes: list[str] = field(default_factory=list)
    """Overrides of the configuration of the run. The command line sets it: give the keys themselves."""

    def __post_init__(self) -> None:
        ShardsCommandSpec.__post_init__(self)
        name = timm_weights_of(self.run)
        require(name != "", f"run={self.run} names no model: give timm:NAME or timm:NAME.TAG")
        require(
            name is None or self.format is EmbeddingFormat.webdataset,
            f"run={self.run} has no text tower, which format={self.format} needs: give format=webdataset",
        )
        require(
            self.views <= self.batch_size,
            f"views={self.views} must be at most batch_size={self.batch_size}, for the crops of an image are embedded "
            "together: 10 to 30 are usual",
        )
        # The data of a run, by data=null, may have these options.
        check_effect(self.data, SAMPLING_OPTIONS if self.views else (*SAMPLING_OPTIONS, *VIEW_OPTIONS), "embeddings")


def embed(spec: EmbedSpec) -> None:
    """Writes the embeddings. Collective.

    Raises ConfigError if `out` contains embeddings of another model, other data or other options.
    """
    data, seed = spec.data, 0
    if data is None:
        saved = find_run(spec.run, spec.changes)
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


main = cli(embed, "embed", unused=UNUSED, of_run=("data",), continues=True)

if __name__ == "__main__":
    main()
