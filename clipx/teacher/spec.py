"""Teachers: who tells a student how alike the images and texts of a batch are, for `objective=distillation`.

A teacher is a model that sees each batch itself (`live`), or the embeddings that `python -m clipx.embed` once wrote of
all samples (`stored`). Either way the objective is given image_bT and text_bT, whose products are the teacher's logits.
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
    run = "run"  # the student's
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass(kw_only=True, slots=True)
class TeacherSpec:
    """Where a teacher comes from: `weights` or `embeddings`."""

    weights: str | None = None  # a model, as for model.weights; its configuration comes with it
    embeddings: str | None = None  # a folder that clipx.embed wrote with this run's training data
    temperature: float | None = None  # of its softmax over a batch; null: the one that it was trained with
    precision: TeacherPrecision = TeacherPrecision.run  # of its weights
    micro_batches: int | None = None  # forward passes that a rank's share is cut into; null: data.micro_batches

    def __post_init__(self) -> None:
        for key, value in (("weights", self.weights), ("embeddings", self.embeddings)):
            require(value != "", f"teacher.{key}= is empty: give a value, or leave it out")
        require(
            self.weights is None or self.embeddings is None,
            f"teacher.weights={self.weights} and teacher.embeddings={self.embeddings} are two teachers: give one",
        )
        require(
            self.temperature is None or self.temperature > 0,
            f"teacher.temperature={self.temperature} must be above 0: 0.01 is usual of a trained model",
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
                f"teacher.{key}={chosen} has no effect without teacher.weights: leave it out",
            )
        require(
            self.temperature is None or self.source_option is not None,
            f"teacher.temperature={self.temperature} has no effect without a teacher: give teacher.weights or "
            "teacher.embeddings, or leave it out",
        )

    @property
    def source_option(self) -> str | None:
        """The option that names the teacher, as typed."""
        if self.weights is not None:
            return f"teacher.weights={self.weights}"
        return None if self.embeddings is None else f"teacher.embeddings={self.embeddings}"

    def check(self, objective: str, taught: bool, data: str, indexed: bool) -> None:
        """Raises ConfigError where the objective and the data, by their kinds, do not go with the teacher."""
        require(
            self.source_option is not None or not taught,
            f"objective={objective} has no teacher: give teacher.weights=… (a run directory, or what model.weights "
            "takes), or teacher.embeddings=… (a folder of python -m clipx.embed)",
        )
        require(
            self.source_option is None or taught,
            f"{self.source_option} has no effect on objective={objective}, which has no teacher: choose "
            "objective=distillation, or leave it out",
        )
        require(
            self.embeddings is None or indexed,
            f"teacher.embeddings={self.embeddings} are found by a sample's number, but data={data} gives samples none: "
            "give teacher.weights",
        )

    def build(self, comm: Comm, precision: Precision, micro_batches: int) -> Teacher | None:
        """The model, on the device; None where there is none. `precision`, `micro_batches`: the run's.

        Raises ClipxError where it cannot be had, or its configuration or temperature is not known.
        """
        if self.weights is None:
            return None
        from clipx.teacher.live import Teacher

        return Teacher.build(self, comm, precision, self.micro_batches or micro_batches)

    def open(self, train: Source) -> StoredEmbeddings | None:
        """The embeddings of the training samples; None where there are none. Raises DataError."""
        if self.embeddings is None:
            return None
        from clipx.teacher.stored import StoredEmbeddings

        return StoredEmbeddings.open(self.embeddings, self.temperature, train)
