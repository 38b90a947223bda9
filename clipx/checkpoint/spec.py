"""Options of checkpoints. A checkpoint is complete or absent, is verified before use, and contains no pickle."""

from __future__ import annotations

from clipx.config.duration import Cadence, a_cadence
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require_effect
from clipx.storage.url import check_folder_url


@register("checkpoint")
@frozen
class CheckpointSpec:
    """Saving of the run's state: cadence, retention, upload."""

    kind: str = "local"
    """Name of the option: local, checkpoints in the run directory."""

    every: str = option("1ep", check=a_cadence(clock=True))
    """Interval between checkpoints: 1ep (epochs), 500st (optimizer steps), 1e6sa (samples) or 30min (minutes), above
    zero; the end of the run is saved too. end: only at the end. none: never."""

    keep_last: int = option(3, ge=1)
    """Number of newest checkpoints to keep. Older ones are removed once a newer one is complete."""

    keep_every: str = option("none", when="every != none", check=a_cadence())
    """Interval of checkpoints that are never removed, in ep, st or sa as for every, above zero: the first checkpoint at
    or after each multiple. none: no such checkpoints."""

    best: str | None = option(None, when="every != none")
    """Name of a metric of one of the run's evaluators, such as eval/zeroshot/top1. A checkpoint is also saved when an
    evaluation reaches a new highest value, and the checkpoint with the highest value is not removed. null: no
    metric."""

    background: bool = True
    """Writes checkpoints in a background thread while training continues. false: training waits until each checkpoint
    is on disk."""

    max_failures: int = option(3, ge=1)
    """Number of failed saves in a row after which the run fails. Fewer failures are only logged."""

    remote: str | None = option(None, when="every != none", check=check_folder_url)
    """URL of a folder of any fsspec file system, such as s3://bucket/runs. Checkpoints and the run's small files are
    uploaded to <remote>/<run_dir> (the whole path of a run_dir outside the working directory). null: no upload."""

    delete_previous: bool = option(False, when="remote")
    """Keeps only the newest of the local checkpoints whose upload is verified, regardless of keep_last, keep_every and
    best."""

    sync_timeout_s: float = option(600.0, gt=0, when="remote", unit="s")
    """Seconds that the end of the run waits for uploads. After that the run exits with code 74."""

    @property
    def cadence(self) -> Cadence:
        """The parsed `every`."""
        return Cadence.parse(self.every, "checkpoint.every", clock=True)

    @property
    def keep_cadence(self) -> Cadence:
        """The parsed `keep_every`."""
        return Cadence.parse(self.keep_every, "checkpoint.keep_every")

    def __post_init__(self) -> None:
        kept, fix = self.keep_every != "end", "give a duration, or none"
        require_effect(kept, "checkpoint.keep_every=end", "on the last checkpoint, which is kept anyway", fix)
