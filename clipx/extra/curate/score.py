"""`python -m clipx.score data=… out=…`: writes a table of scores with a row for each training sample.

Runs on any number of ranks, which share the parts. A killed command continues when it is started again.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from clipx.cli import cli, imports
from clipx.command_spec import UNUSED, ShardsCommandSpec, given_data
from clipx.config.registry import frozen, option, register
from clipx.data.spec import SAMPLING_OPTIONS, VIEW_OPTIONS, check_effect
from clipx.errors import require, require_effect
from clipx.evaluator.spec import check_data
from clipx.storage.url import check_file
from clipx.weights.spec import check_exists


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
class ScoreSpec(ShardsCommandSpec):
    """`python -m clipx.score`: writes a table of scores with a row for each training sample of a data set.

    The table is OUT/scores.parquet. Images are preprocessed as in evaluation: usually resized by the shorter side and
    cropped to the centre.
    """

    kind: str = "score"
    """Kind of the command's configuration. Fixed."""

    scores: list[Score] = field(default_factory=lambda: [Score.caption, Score.image, Score.duplicates])
    """Scores to compute: any of `similarity`, `aesthetic` and `semantic`, which need `run`, and `caption`, `image`,
    `duplicates` and `entries`. Nothing else is computed: images are not decoded for `caption` and `entries` alone."""

    run: str | None = None  # type: ignore[assignment]  # the other commands require it
    """Model of the scores `similarity`, `aesthetic` and `semantic`: any value of model.weights. Of a run, the moving
    average of its weights if it has one."""

    head: str | None = None
    """File with the linear head of the score `aesthetic`: .safetensors, .pt or .npz with one weight for each dimension
    of the embedding and one bias."""

    entries: str | None = option(None, check=check_file(".txt", ".json"))
    """Metadata list of the score `entries`: a .json list of texts, or a .txt file with an entry per line. An entry has
    the number of its place in the list, from 0."""

    seed: int = option(0, ge=0)
    """Seed of data.mismatched, as of a run, and of the clusters."""

    clusters: int = option(100, ge=1)
    """Number of clusters of the score `semantic`. Pairs are compared within a cluster."""

    def __post_init__(self) -> None:
        ShardsCommandSpec.__post_init__(self)
        require(bool(self.scores), f"scores=[] is empty: give some of {', '.join(Score)}")
        require(len({*self.scores}) == len(self.scores), f"scores=[{','.join(self.scores)}] repeats a score: remove it")
        for key, default, scores, needed in (
            ("run", None, OF_MODEL, "model"),
            ("model", None, OF_MODEL, ""),
            ("head", None, (Score.aesthetic,), "linear head"),
            ("entries", None, (Score.entries,), "metadata list"),
            ("clusters", 100, (Score.semantic,), ""),
        ):
            value, of = getattr(self, key), [score for score in self.scores if score in scores]
            given = f"{key}={getattr(value, 'name', value)}"
            require_effect(bool(of) or value == default, given, f"without {', '.join(scores)} in scores")
            if of and needed:
                require(value is not None, f"scores=[…,{of[0]}] needs a {needed}: give {key}=…, or remove {of[0]}")
        seeded = Score.semantic in self.scores or (self.data is not None and self.data.mismatched > 0)
        require_effect(seeded or not self.seed, f"seed={self.seed}", "without data.mismatched and semantic in scores")
        check_effect(self.data, (*SAMPLING_OPTIONS, *VIEW_OPTIONS), "scores")


def score(spec: ScoreSpec) -> None:
    """Writes the scores. Collective. Raises ConfigError if `out` contains scores of other options."""
    data = given_data(spec.data)
    check_data(data, {}, files=spec.distributed.check_launch().world == 1, trains=True)
    if spec.run is not None:
        check_exists(spec.run, "run")
    with imports():
        from clipx.extra.curate.writer import write_scores

    with spec.distributed.joined() as comm:
        write_scores(spec, data, comm)


main = cli(score, "score", unused=UNUSED, continues=True)

if __name__ == "__main__":  # loader processes import this module again
    main()
