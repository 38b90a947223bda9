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


@frozen
class TeacherSpec:
    """Teacher for objective=distillation, or reference for drrho_clip: a model (weights) or its stored embeddings
    (embeddings)."""

    weights: str | None = None
    """Teacher model, in any form that model.weights accepts. Its configuration is loaded with the weights. null: no
    teacher model. Excludes embeddings."""

    embeddings: Any = None  # OmegaConf has no type for a string or a list
    """Local folder of teacher embeddings that python -m clipx.embed wrote for the training data of this run, in format
    npy; or the folders of an ensemble of teachers, [FOLDER,FOLDER], of the same views. null: no stored embeddings.
    Excludes weights."""

    temperature: Any = None
    """Temperature of the teacher's softmax over a batch, above 0; the logits are divided by it. Of an ensemble, one for
    all teachers or a list with one for each. null: the temperature that the teacher was trained with. Needs weights or
    embeddings. Must be null with drrho_clip and with objective.distill_weight=0, which do not use it."""

    precision: TeacherPrecision = TeacherPrecision.run
    """Number format of the teacher model: run (the precision of the student), fp32, bf16 or fp16. Needs weights."""

    micro_batches: int | None = None
    """Number of forward passes of the teacher that each rank's share of the batch is split into, at least 1. null:
    data.micro_batches. Needs weights."""

    def __post_init__(self) -> None:
        embeddings, temperature = _text(self.embeddings), _text(self.temperature)
        for key, value in (("weights", self.weights), ("embeddings", embeddings)):
            require(value not in ("", "[]"), f"teacher.{key}={value} is empty: give a value, or drop it")
        require(
            self.weights is None or self.embeddings is None,
            f"teacher.weights={self.weights} and teacher.embeddings={embeddings} are two teachers: give one",
        )
        self._check_folders()
        self._check_temperature()
        require(
            self.micro_batches is None or self.micro_batches >= 1,
            f"teacher.micro_batches={self.micro_batches} must be at least 1",
        )
        of_models = {"precision": self.precision.removeprefix("run"), "micro_batches": self.micro_batches}
        for key, chosen in of_models.items():
            require(
                not chosen or self.weights is not None,
                f"teacher.{key}={chosen} has no effect without teacher.weights: drop it",
            )
        require(
            self.temperature is None or self.source_option is not None,
            f"teacher.temperature={temperature} has no effect without a teacher: give teacher.weights or "
            "teacher.embeddings, or drop it",
        )

    def _check_folders(self) -> None:
        for folder in self.folders:
            require(
                isinstance(folder, str) and bool(folder),
                f"teacher.embeddings={_text(self.embeddings)} must be a folder, or a list of folders: [FOLDER,FOLDER]",
            )
            check_path("teacher.embeddings", folder)
            require(
                self.folders.count(folder) == 1,
                f"teacher.embeddings={_text(self.embeddings)} has {folder} twice: give each teacher once",
            )

    def _check_temperature(self) -> None:
        given = self.temperature if isinstance(self.temperature, list) else [self.temperature]
        for value in () if self.temperature is None else given:
            require(
                type(value) in (int, float) and 0 < value < math.inf,
                f"teacher.temperature={_text(self.temperature)} must be above 0: 0.01 is usual for a trained model",
            )
        require(
            not isinstance(self.temperature, list) or len(given) == max(1, len(self.folders)),
            f"teacher.temperature={_text(self.temperature)} has {len(given)} temperatures for "
            f"{max(1, len(self.folders))} teachers: give one for each, or a single number for all",
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
        return None if self.embeddings is None else f"teacher.embeddings={_text(self.embeddings)}"

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

        return Teacher.build(self, comm, precision, self.micro_batches or micro_batches, logits)

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


def _text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
