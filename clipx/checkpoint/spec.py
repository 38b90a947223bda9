"""Options of checkpoints: complete or absent, verified before they are trusted, without pickle.

format.py         the format on disk, and how it is read
staging.py        memory that tensors are copied into, laid out as the file that is written from it
async_writer.py   saving while training continues: one thread of each rank writes, rank 0 commits
retention.py      which checkpoints are kept
state.py          modules and optimizers as tensors by name
uploader.py       the copy at a URL, made while training continues
downloader.py     and read from there
manager.py        all of it, as the trainer uses it
resume.py         what `resume=` accepts
"""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.duration import check_cadence
from clipx.config.registry import option
from clipx.errors import require
from clipx.storage.url import check_folder_url


@option("checkpoint")
@dataclass(kw_only=True, slots=True)
class CheckpointSpec:
    """When the run's state is saved, which checkpoints stay, and where else they go."""

    kind: str = "local"
    every: str = "1ep"  # a duration (1ep, 500st, 1e6sa; happens at the end too), end, or none
    keep_last: int = 3  # older ones are removed once a newer one is whole
    keep_every: str = "none"  # a duration: those saved at its multiples stay for ever
    best: str | None = None  # a metric's name: the one with its highest value stays as well
    background: bool = True  # false: training waits until a checkpoint is on disk
    max_failures: int = 3  # so many failed saves in a row end the run
    remote: str | None = None  # s3://bucket/prefix: checkpoints are copied there too
    # Of those whose upload is verified only the newest stays here, whatever keep_last, keep_every and best say.
    delete_previous: bool = False
    sync_timeout_s: float = 600.0  # how long the end of the run waits for uploads

    def __post_init__(self) -> None:
        check_cadence(self.every, "checkpoint.every", clock=True)
        check_cadence(self.keep_every, "checkpoint.keep_every")
        require(
            self.keep_every != "end",
            "checkpoint.keep_every=end keeps nothing more, for the last one stays anyway: give a duration, or none",
        )
        for key, count in {"keep_last": self.keep_last, "max_failures": self.max_failures}.items():
            require(count >= 1, f"checkpoint.{key}={count} must be at least 1")
        for key, text in {"best": self.best, "remote": self.remote}.items():
            require(text != "", f"checkpoint.{key}= is empty: give a value, or null")
        if self.remote is not None:
            check_folder_url("checkpoint.remote", self.remote)
        require(
            self.remote is not None or not self.delete_previous,
            "checkpoint.delete_previous=true deletes only what is uploaded, and checkpoint.remote is not set: set it, "
            "or keep fewer by checkpoint.keep_last",
        )
        require(
            self.sync_timeout_s > 0,
            f"checkpoint.sync_timeout_s={self.sync_timeout_s:g} must be above 0 s: the default is 600",
        )
        wanted = {"keep_every": self.keep_every != "none", "best": self.best, "remote": self.remote}
        idle = [key for key, value in wanted.items() if value] if self.every == "none" else []
        require(
            not idle,
            f"checkpoint.every=none saves nothing, so that checkpoint.{' and checkpoint.'.join(idle)} "
            f"{'have' if len(idle) > 1 else 'has'} no effect: give a duration or end, or leave it out",
        )
