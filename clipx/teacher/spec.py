"""Options of the teacher, whose image-text similarities a student learns with `objective=distillation`, or which are
the reference of `objective=drrho_clip`.

A teacher is a model that embeds each batch (`live`), or embeddings of all samples that `python -m clipx.embed` wrote
(`stored`). In both cases the objective gets image_bT and text_bT, whose products are the teacher's logits, or its
similarities for an objective with `teacher_logits` False.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from clipx.errors import require
from clipx.storage.url import check_path

if TYPE_CHECKING:
    from clipx.data.source import Source
    from clipx.distributed.comm import Comm
    from clipx.precision.spec import Precision
    from clipx.teacher.live import Teacher
    from clipx.teacher.stored import StoredEmbeddings


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


@dataclass(kw_only=True, slots=True)
class TeacherSpec:
    """Teacher for objective=distillation, or reference for drrho_clip: a model (weights) or its stored embeddings
    (embeddings)."""

    weights: str | None = None
    """Teacher model, in any form that model.weights accepts. Its configuration is loaded with the weights. null: no
    teacher model. Excludes embeddings."""

    embeddings: str | None = None
    """Local folder of teacher embeddings that python -m clipx.embed wrote for the training data of this run, in format
    npy. null: no stored embeddings. Excludes weights."""

    temperature: float | None = None
    """Temperature of the teacher's softmax over a batch, above 0; the logits are divided by it. null: the temperature
    that the teacher was trained with. Needs weights or embeddings. Must be null with drrho_clip, which uses the
    temperature of the model."""

    precision: TeacherPrecision = TeacherPrecision.run
    """Number format of the teacher model: run (the precision of the student), fp32, bf16 or fp16. Needs weights."""

    micro_batches: int | None = None
    """Number of forward passes of the teacher that each rank's share of the batch is split into, at least 1. null:
    data.micro_batches. Needs weights."""

    def __post_init__(self) -> None:
        for key, value in (("weights", self.weights), ("embeddings", self.embeddings)):
            require(value != "", f"teacher.{key}= is empty: give a value, or drop it")
        require(
            self.weights is None or self.embeddings is None,
            f"teacher.weights={self.weights} and teacher.embeddings={self.embeddings} are two teachers: give one",
        )
        require(
            self.temperature is None or self.temperature > 0,
            f"teacher.temperature={self.temperature} must be above 0: 0.01 is usual for a trained model",
        )
        require(
            self.micro_batches is None or self.micro_batches >= 1,
            f"teacher.micro_batches={self.micro_batches} must be at least 1",
        )
        if self.embeddings is not None:
            check_path("teacher.embeddings", self.embeddings)
        of_models = {"precision": self.precision.removeprefix("run"), "micro_batches": self.micro_batches}
        for key, chosen in of_models.items():
            require(
                not chosen or self.weights is not None,
                f"teacher.{key}={chosen} has no effect without teacher.weights: drop it",
            )
        require(
            self.temperature is None or self.source_option is not None,
            f"teacher.temperature={self.temperature} has no effect without a teacher: give teacher.weights or "
            "teacher.embeddings, or drop it",
        )

    @property
    def source_option(self) -> str | None:
        """The option that selects the teacher, as KEY=VALUE; None if there is no teacher."""
        if self.weights is not None:
            return f"teacher.weights={self.weights}"
        return None if self.embeddings is None else f"teacher.embeddings={self.embeddings}"

    def check(self, objective: str, taught: bool, logits: bool, data: str, indexed: bool) -> None:
        """Raises ConfigError if the teacher does not fit the objective or the data.

        Args:
            objective: kind of the objective.
            taught: whether the objective needs a teacher.
            logits: whether it compares with the teacher's logits, not with its similarities.
            data: kind of the data.
            indexed: whether the data has sample indices.
        """
        require(
            self.source_option is not None or not taught,
            f"objective={objective} needs a teacher: give teacher.weights=… (a run directory, or another value that "
            "model.weights accepts), or teacher.embeddings=… (a folder written by python -m clipx.embed)",
        )
        require(
            self.source_option is None or taught,
            f"{self.source_option} has no effect with objective={objective}, which uses no teacher: choose "
            "objective=distillation or objective=drrho_clip, or drop it",
        )
        require(
            self.temperature is None or logits,
            f"teacher.temperature={self.temperature} has no effect with objective={objective}, which divides the "
            "teacher's similarities by the temperature of the model: drop it",
        )
        require(
            self.embeddings is None or indexed,
            f"teacher.embeddings={self.embeddings} needs sample indices, which data={data} does not have: give "
            "teacher.weights instead",
        )

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

    def open(self, train: Source, logits: bool) -> StoredEmbeddings | None:
        """Opens the stored embeddings of the training samples. Returns None if there are none. `logits`: see `build`.

        Raises DataError if they are incomplete or of other data, and ConfigError if the temperature is unknown.
        """
        if self.embeddings is None:
            return None
        from clipx.teacher.stored import StoredEmbeddings

        return StoredEmbeddings.open(self.embeddings, self.temperature, train, logits)
