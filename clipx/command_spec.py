"""Base classes of the options of the commands that read weights of any kind or data, declared once for all of them."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from clipx.config.options import option
from clipx.config.registry import MISSING
from clipx.config.specs import frozen
from clipx.data.spec import DataSpec
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError, require, require_effect, without_effect
from clipx.evaluator.spec import EvaluatorSpec
from clipx.model.spec import ModelSpec
from clipx.precision.spec import Fp32Spec, PrecisionSpec
from clipx.storage.url import check_folder_url

_UNUSED_MODEL_GROUPS = ("objective", "optimizer")
UNUSED = ("evaluator", *_UNUSED_MODEL_GROUPS)
"""Groups of which options of the groups data and model select an option, without effect on most commands."""

UNUSED_WITH_EVALUATOR = _UNUSED_MODEL_GROUPS
"""The same for commands that evaluate."""


def given_data(data: DataSpec | None) -> DataSpec:
    """Returns the data of a command that requires it. Raises ConfigError without."""
    if data is None:
        raise ConfigError("data has no value: give the data to read, e.g. data=shapes")
    return data


def check_no_weights(model: ModelSpec, reason: str) -> None:
    """Raises ConfigError for a model with initial weights, which have no effect for a `reason`."""
    towers = {f"{tower}.weights": location for tower, location in model.tower_weights.items()}
    for key, location in {"weights": model.weights, **towers}.items():
        require_effect(location is None, f"model.{key}={location}", reason)


@frozen
class GroupsSpec:
    """Groups of which options of the groups data and model select options."""

    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)
    """Evaluators by name, selected by evaluator=[zeroshot,retrieval]. clipx.evaluate: empty: those of the run; required
    for other weights. An error for commands that evaluate nothing."""

    objective: Any = None
    """Unused: options of the group model select it. Setting it is an error."""

    optimizer: Any = None
    """Unused: options of the group model select it. Setting it is an error."""


@frozen
class DataGroupsSpec(GroupsSpec):
    """Options of a command that reads data without a model's weights."""

    data: DataSpec | None = None
    """Data whose training samples are read. Required. The options have the same effect as in training."""


@frozen
class WeightsModelSpec(GroupsSpec):
    """The group model of a command that reads weights."""

    model: ModelSpec | None = None
    """Model of weights without a configuration, such as a bare epoch_32.pt of open_clip's trainer: an option of the
    group with its keys, as in the training. An error for weights with a configuration. null: they have one."""

    def __post_init__(self) -> None:
        model = self.model
        if model is None:
            return
        check_no_weights(model, "with weights that another option names")
        locks = model.lock_options
        require_effect(not locks, f"model.{locks}", "without training")

    def check_unused(self, place: str) -> None:
        """Raises ConfigError if the model of weights with a configuration is given. `place`: option and location."""
        if self.model is not None:
            raise without_effect(f"model={self.model.name}", f"on {place}, whose configuration describes its model")


@frozen
class ModelCommandSpec(WeightsModelSpec):
    """Options of a command that computes with a model."""

    precision: PrecisionSpec | None = None
    """Number format of the model. null: fp32; for clipx.evaluate that of the run, but fp32 instead of amp_bf16 on a CPU
    and on a GPU without bfloat16."""

    distributed: DistributedSpec = MISSING
    """Processes and devices, which share the work."""

    @property
    def number_format(self) -> PrecisionSpec:
        """The number format, fp32 for null."""
        return self.precision or Fp32Spec()


@frozen
class RunCommandSpec(ModelCommandSpec):
    """Options of a command that computes with the model of a run or with other weights."""

    run: str = MISSING
    """Model: a run directory, a path or a URL, or any other value of model.weights. Of a run, the moving average of its
    weights if it has one. clipx.evaluate: also a checkpoint, a folder of runs, or a folder of weight files.
    clipx.caption: a captioning model. clipx.embed format=webdataset: also an image tower alone, timm:NAME.TAG, or a
    folder or hf-hub:ORG/NAME of a model of timm."""


@frozen
class DataCommandSpec(RunCommandSpec):
    """Options of a command that computes with a model on data."""

    data: DataSpec | None = None
    """Data: its held-out samples for clipx.evaluate, its training samples for clipx.score. null: for clipx.evaluate and
    clipx.embed the data of the run."""


def _check_folder(key: str, out: str) -> None:
    """Raises ConfigError for an empty name of a folder, and as `check_folder_url`."""
    require(bool(out), f"{key}= is empty: give a folder, or a URL of one")
    if "://" in out:
        check_folder_url(key, out)


@frozen
class ShardsCommandSpec(DataCommandSpec):
    """Options of a command that writes what it computes of each sample, in parts that the ranks share."""

    out: str = option(MISSING, check=_check_folder)
    """Output folder, or its URL."""

    samples_per_shard: int = option(50_000, ge=1)
    """Number of samples in a part of the output, which is held in memory until it is written."""

    batch_size: int = option(256, ge=1)
    """Number of images or captions embedded at a time."""
