"""Expected results of a run: what a publication reports for an experiment, and where (conf/expectation)."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipx.config.messages import one_line, unknown_option
from clipx.config.registry import MISSING, file_spec, frozen, option_files
from clipx.config.safe_yaml import read_saved
from clipx.errors import ClipxError, ConfigError, require

_FOLDER = "expectation"


@frozen
class ExpectedMetric:
    """Published value of one metric."""

    value: float = MISSING
    """Published value, a finite number in the unit of the metric: shares in [0, 1], not percentages."""

    source: str = MISSING
    """Publication with its table, or repository with the file and row."""

    tolerance: float | None = None
    """Largest deviation that counts as reached, at least 0: the deviation over seeds, if the source gives one. null:
    the source gives none."""

    lower_is_better: bool = False
    """Whether a lower value is better, as of median_rank."""

    mean_of: list[str] = field(default_factory=list)
    """Metrics of clipx whose mean is compared. Empty: the metric with the name of this entry."""

    command: str | None = None
    """Command that measures the metric, for a run in which it is missing; RUN stands for the run directory."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.value), f"value={self.value} is not a finite number: give the published one")
        require(
            self.tolerance is None or 0 <= self.tolerance < math.inf,
            f"tolerance={self.tolerance} must be at least 0: remove it if the source gives none",
        )
        require(bool(self.source.strip()), "source= is empty: name the publication with its table or file")


@file_spec(_FOLDER)
@frozen
class PublishedResults:
    """Expected results of a run, and the configuration that they belong to."""

    overrides: list[str] = MISSING
    """Overrides of clipx.train that give the configuration of the source, e.g. [experiment=cc3m_rn50_fastclip_v3]."""

    metrics: dict[str, ExpectedMetric] = MISSING
    """Published metrics by the name that clipx logs, such as eval/zeroshot/imagenet/top1."""

    samples: int | None = None
    """Number of training samples of the source. null: unknown."""

    ranks: int | None = None
    """Number of ranks of the source, for models with BatchNorm, whose statistics depend on it. null: no effect."""

    notes: list[str] = field(default_factory=list)
    """Known differences between the source and the experiment, one sentence each. They are printed."""

    def __post_init__(self) -> None:
        require(bool(self.metrics), "metrics has no entry: give at least one metric with value and source")


def load_expectation(name: str, folders: Sequence[Path]) -> PublishedResults:
    """Returns the expectation of a name, or of a path to a file. `folders`: those of --config-dir.

    Raises ConfigError for an unknown name, with a list of the known ones, and for an invalid file.
    """
    files = option_files(_FOLDER, folders)
    is_path = "/" in name or re.search(r"\.ya?ml$", name) is not None
    if not is_path and name not in files:
        raise ConfigError(f"{unknown_option('expected', name, list(files))}, or give the path of a YAML file")
    path = Path(name) if is_path else files[name]
    require(path.is_file(), f"expected={name} does not exist: give the path of a YAML file, or one of {_list(files)}")
    return _parse(path, read_saved(path, "an expectation"))


def _list(files: dict[str, Path]) -> str:
    return ", ".join(sorted(files))


def _parse(path: Path, values: dict[str, Any]) -> PublishedResults:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(PublishedResults), values)
        for key in ("overrides", "metrics"):
            require(not OmegaConf.is_missing(merged, key), f"{key} has no value: it is required")
        for metric in merged.metrics:
            for key in ("value", "source"):
                missing = OmegaConf.is_missing(merged.metrics[metric], key)
                require(not missing, f"metrics.{metric}.{key} has no value: it is required")
        return typing.cast(PublishedResults, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error
    except ClipxError as error:
        raise ConfigError(f"{path}: {error}") from error
