"""Values of `resume=`, and names of checkpoint folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clipx.errors import ConfigError
from clipx.storage.url import check_url

CHECKPOINTS = "checkpoints"  # folder name in a run directory and in its remote copy


@dataclass(frozen=True, slots=True)
class Resume:
    """Parsed value of `resume=`. `run_dir` and `url` are None if the run resumes from its run directory."""

    text: str  # the value
    enabled: bool  # False: a new run
    required: bool = False  # an error if there is nothing to resume from
    step: int | None = None  # of the checkpoint; None: the newest
    run_dir: str | None = None
    url: str | None = None
    open_clip: str | None = None  # a checkpoint of open_clip's trainer, from which a new run starts

    @property
    def place(self) -> str | None:
        """Directory or URL of the run that was named."""
        return self.run_dir or self.url

    @classmethod
    def parse(cls, text: str) -> Resume:
        """Parses a value of `resume=`.

        Accepts `none`, `auto`, `latest`, `step:N`, the path or URL of a run directory or of one of its checkpoints, or
        a .pt file of open_clip's trainer. Raises ConfigError.
        """
        if text in ("none", "auto"):
            return cls(text, text == "auto")
        if text == "latest":
            return cls(text, True, True)
        if text.startswith("step:"):
            number = text.removeprefix("step:")
            if not re.fullmatch(r"[0-9]{1,18}", number):
                raise ConfigError(f"resume={text} is not a step: give its number, e.g. resume=step:1000")
            return cls(text, True, True, int(number))
        check_url("resume", text)
        if text.endswith(".pt"):
            return cls(text, False, open_clip=text)
        location, step = split_checkpoint(text)
        if "://" in location:
            return cls(text, True, True, step, url=location)
        return cls(text, True, True, step, run_dir=location)


def split_checkpoint(location: str) -> tuple[str, int | None]:
    """Splits the path or URL of a run, or of one of its checkpoints, into the run's and the step, None for a run."""
    location = location.rstrip("/")
    folder = Path(location)
    if is_checkpoint(folder.name) and folder.parent.name == CHECKPOINTS:
        return location.removesuffix(f"{CHECKPOINTS}/{folder.name}").rstrip("/") or ".", step_of(folder)
    return location, None


def step_folder(step: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def is_checkpoint(name: str) -> bool:
    """Returns whether a folder name has the form of a checkpoint's, which is unique to its step."""
    return re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,17})", name) is not None


def step_of(folder: Path) -> int:
    """Returns the step of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))
