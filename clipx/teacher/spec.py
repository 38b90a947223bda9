"""Options of the teacher, whose image-text similarities a student learns with `objective=distillation`, or which are
the reference of `objective=drrho_clip`.

A teacher is a model that embeds each batch (`live`), or embeddings of all samples that `python -m clipx.embed` wrote
(`stored`). In both cases the objective gets image_bT and text_bT, whose products are the teacher's logits, or its
similarities for an objective with `teacher_logits` False. Of several stored teachers it gets such a pair each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from clipx.config.options import option, typed
from clipx.config.specs import frozen
from clipx.errors import require
from clipx.storage.url import check_path

if TYPE_CHECKING:
    from clipx.data.source import Source
    from clipx.distributed.comm import Comm
    from clipx.precision.spec import Precision
    from clipx.teacher.live import Teacher
    from clipx.teacher.stored import StoredTeachers


class TeacherPrecision(StrEnum):
    """Number format of a teacher model."""

    run = "run"
    """The precision of the run, as for the student."""

    fp32 = "fp32"
    """Weights and computation in float32."""

    bf16 = "bf16"
    """Weights and computation in bfloat16."""

    fp16 = "fp16"
    """Weights and computation in float16."""


def _check_embeddings(key: str, value: Any) -> None:
    folders = value if isinstance(value, list) else [value]
    require(
        bool(folders) and all(isinstance(folder, str) and folder for folder in folders),
        f"{key}={typed(value)} must be a folder, or a list of folders: [FOLDER,FOLDER]",
    )
    for folder in folders:
        check_path(key, folder)
        require(folders.count(folder) == 1, f"{key}={typed(value)} has {folder} twice: give each teacher once")


def _check_temperature(key: str, value: Any) -> None:
    given = value if isinstance(value, list) else [value]
    require(
        all(type(one) in (int, float) and 0 < one < math.inf for one in given),
        f"{key}={typed(value)} must be above 0: 0.01 is usual for a trained model",
    )


@frozen
class TeacherSpec:
    """Teacher for objective=distillation, or reference for drrho_clip: a model (weights) or its stored embeddings
    (embeddings)."""

    weights: str | None = option(None, when="not embeddings and objective.taught")
    """Teacher model, in any form that model.weights accepts. Its configuration is loaded with the weights. It embeds
    each of the micro-batches of the run. null: no teacher model."""

    # OmegaConf has no type for a string or a list, or a number or a list.
    embeddings: Any = option(None, when="objective.taught", check=_check_embeddings)
    """Local folder of teacher embeddings that python -m clipx.embed wrote for the training data of this run, in format
    npy; or the folders of an ensemble of teachers, [FOLDER,FOLDER], of the same views. null: no stored embeddings."""

    temperature: Any = option(None, when="objective.taught and objective.teacher_logits", check=_check_temperature)
    """Temperature of the teacher's softmax over a batch, above 0; the logits are divided by it. Of an ensemble, one for
    all teachers or a list with one for each. null: the temperature that the teacher was trained with. Objective
    drrho_clip does not use it, nor does objective.distill_weight=0."""

    precision: TeacherPrecision = option(TeacherPrecision.run, when="weights")
    """Number format of the teacher model: run (the precision of the student), fp32, bf16 or fp16."""

    def __post_init__(self) -> None:
        given, teachers = self.temperature, max(1, len(self.folders))
        require(
            not isinstance(given, list) or len(given) == teachers,
            f"teacher.temperature={typed(given)} does not fit {teachers} teachers: give a list with one for each, or a "
            "single number for all",
        )

    @property
    def folders(self) -> list[str]:
        """The folders of stored embeddings, one per teacher."""
        if self.embeddings is None:
            return []
        return list(self.embeddings) if isinstance(self.embeddings, list) else [self.embeddings]

    @property
    def temperatures(self) -> Sequence[float | None]:
        """The temperature of each teacher; None: that of its training."""
        if isinstance(self.temperature, list):
            return self.temperature
        return [self.temperature] * max(1, len(self.folders))

    @property
    def source_option(self) -> str | None:
        """The option that selects the teacher, as KEY=VALUE; None if there is no teacher."""
        if self.weights is not None:
            return f"teacher.weights={self.weights}"
        return None if self.embeddings is None else f"teacher.embeddings={typed(self.embeddings)}"

    def build(self, comm: Comm, precision: Precision, micro_batches: int, logits: bool) -> Teacher | None:
        """Loads the teacher model onto the device. Returns None if there is none.

        Args:
            precision: precision of the run.
            micro_batches: data.micro_batches of the run.
            logits: whether the products of the embeddings are logits, not similarities.

        Raises ClipxError if the weights cannot be loaded, or if their configuration or temperature is unknown.
        """
        if self.weights is None:
            return None
        from clipx.teacher.live import Teacher

        return Teacher.build(self, comm, precision, micro_batches, logits)

    def open(self, train: Source, options: Mapping[str, Any], logits: bool) -> StoredTeachers | None:
        """Opens the stored embeddings of the training samples. Returns None if there are none.

        Args:
            options: options of crops and augmentation of the run, which stored views must have.
            logits: see `build`.

        Raises DataError if they are incomplete or of other data, and ConfigError if the temperature is unknown or the
        views differ.
        """
        if self.embeddings is None:
            return None
        from clipx.teacher.stored import StoredTeachers

        return StoredTeachers.open(self.folders, self.temperatures, train, options, logits)
