"""Scores of samples, and their table: the options of `python -m clipx.score`."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from clipx.config.registry import MISSING, frozen, register
from clipx.data.shards.index import RETRY_S
from clipx.data.spec import SAMPLING_OPTIONS, VIEW_OPTIONS, DataSpec, check_effect
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require
from clipx.precision.spec import PrecisionSpec
from clipx.storage.url import check_folder_url
from clipx.weights.model_spec import WeightsModelSpec

_MOST_BITS = 16  # of 64: pictures with more differences have nothing in common


class Score(StrEnum):
    """Groups of scores."""

    similarity = "similarity"
    """Cosine of image and caption."""

    aesthetic = "aesthetic"
    """Linear head on the image embedding."""

    caption = "caption"
    """Number, lengths and script of captions."""

    image = "image"
    """Size and entropy of the image."""

    duplicates = "duplicates"
    """Equal files and nearly equal pictures."""

    entries = "entries"
    """Entries of a metadata list that the captions contain."""

    semantic = "semantic"
    """Clusters of image embeddings, and cosines in them."""


OF_MODEL = (Score.similarity, Score.aesthetic, Score.semantic)
"""Scores that need a model."""


@register("")
@frozen
class ScoreSpec(WeightsModelSpec):
    """`python -m clipx.score`: writes a table of scores with a row for each training sample of a data set.

    Images are preprocessed as in evaluation: usually resized by the shorter side and cropped to the centre.
    """

    kind: str = "score"
    """Kind of the command's configuration. Fixed."""

    data: DataSpec | None = None
    """Data whose training samples are scored. Required. data.workers processes per rank read the samples."""

    out: str = MISSING
    """Output folder, or its URL. The table is OUT/scores.parquet."""

    scores: list[Score] = field(default_factory=lambda: [Score.caption, Score.image, Score.duplicates])
    """Scores to compute: any of `similarity`, `aesthetic` and `semantic`, which need `run`, and `caption`, `image`,
    `duplicates` and `entries`. Nothing else is computed: images are not decoded for `caption` and `entries` alone."""

    run: str | None = None
    """Model of the scores `similarity`, `aesthetic` and `semantic`: any value of model.weights. Of a run, the moving
    average of its weights if it has one."""

    head: str | None = None
    """File with the linear head of the score `aesthetic`: .safetensors, .pt or .npz with one weight for each dimension
    of the embedding and one bias."""

    entries: str | None = None
    """Metadata list of the score `entries`: a .json list of texts, or a .txt file with an entry per line. An entry has
    the number of its place in the list, from 0."""

    seed: int = 0
    """Seed of data.mismatched, as of a run, and of the clusters. At least 0."""

    near_bits: int = 4
    """Largest number of differing bits, of 64, in the perceptual hashes of near duplicates, in [0, 16]."""

    clusters: int = 100
    """Number of clusters of the score `semantic`, at least 1. Pairs are compared within a cluster."""

    samples_per_part: int = 100_000
    """Number of samples of a part, at least 1. A part is held in memory until it is written."""

    batch_size: int = 256
    """Number of images or captions embedded at a time, at least 1."""

    retry_s: float = RETRY_S
    """Seconds for which a failed request to the URL `out` is retried before the command ends. 0: a single attempt."""

    precision: PrecisionSpec = MISSING
    """Number format of the towers."""

    distributed: DistributedSpec = MISSING
    """Processes and devices."""

    evaluator: dict[str, Any] = field(default_factory=dict)
    """Unused: options of the group data select evaluators. Setting it is an error."""

    def __post_init__(self) -> None:
        WeightsModelSpec.__post_init__(self)
        require(bool(self.out), "out= is empty: give a folder, or a URL of one")
        if "://" in self.out:
            check_folder_url("out", self.out)
        require(bool(self.scores), f"scores=[] is empty: give some of {', '.join(Score)}")
        require(len({*self.scores}) == len(self.scores), f"scores=[{','.join(self.scores)}] repeats a score: remove it")
        self._check_effects()
        for key in ("clusters", "samples_per_part", "batch_size"):
            require(getattr(self, key) >= 1, f"{key}={getattr(self, key)} must be at least 1")
        require(self.seed >= 0, f"seed={self.seed} is negative: give 0 or more")
        require(0 <= self.near_bits <= _MOST_BITS, f"near_bits={self.near_bits} must be in [0, {_MOST_BITS}]")
        require(self.retry_s >= 0, f"retry_s={self.retry_s} is negative: give 0 for a single attempt, or more seconds")
        check_effect(self.data, (*SAMPLING_OPTIONS, *VIEW_OPTIONS), "scores")

    def _check_effects(self) -> None:
        """Raises ConfigError for a missing option of a score, and for an option of a score that is not computed."""
        modelled = [score for score in self.scores if score in OF_MODEL]
        if modelled:
            require(
                self.run is not None, f"scores=[…,{modelled[0]}] needs a model: give run=…, or remove {modelled[0]}"
            )
        else:
            require(
                self.run is None, f"run={self.run} has no effect without {', '.join(OF_MODEL)} in scores: remove it"
            )
            require(self.model is None, "model=… has no effect without run=…: remove it")
        for key, value, default, score in (
            ("head", self.head, None, Score.aesthetic),
            ("entries", self.entries, None, Score.entries),
            ("near_bits", self.near_bits, 4, Score.duplicates),
            ("clusters", self.clusters, 100, Score.semantic),
        ):
            require(
                value == default or score in self.scores,
                f"{key}={value} has no effect without {score} in scores: remove it",
            )
        for key, value, score, needed in (
            ("head", self.head, Score.aesthetic, "linear head"),
            ("entries", self.entries, Score.entries, "metadata list"),
        ):
            require(
                value is not None or score not in self.scores,
                f"scores=[…,{score}] needs a {needed}: give {key}=FILE, or remove {score}",
            )
        require(
            self.entries is None or self.entries.endswith((".txt", ".json")),
            f"entries={self.entries} must end in .txt or .json",
        )
        seeded = Score.semantic in self.scores or (self.data is not None and self.data.mismatched > 0)
        require(
            not self.seed or seeded,
            f"seed={self.seed} has no effect without data.mismatched, or semantic in scores: remove it",
        )
