"""Teacher model that embeds each batch, replicated on every rank and not trained."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipx.data.batch import Batch
from clipx.data.texts import TeacherTexts
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.model.clip import CLIP, parameter_count
from clipx.precision.spec import Precision
from clipx.teacher.spec import TeacherPrecision, TeacherSpec
from clipx.weights.load import LoadedWeights, load_model

_DTYPES = {TeacherPrecision.fp32: "float32", TeacherPrecision.bf16: "bfloat16", TeacherPrecision.fp16: "float16"}


@dataclass(frozen=True, slots=True)
class Teacher:
    """Adds (α·image_bT, text_bT) to `Batch.targets`, in float32, or in float64 if its weights are float64."""

    model: CLIP
    size: int  # side of its images in pixels
    texts: TeacherTexts  # its tokenizer, which the loader applies to each sample
    scale: float  # α, the inverse of the teacher's temperature, or 1 if its similarities are used without it
    precision: Precision
    micro_batches: int
    digest: str  # digest of the teacher's weights, see weights_digest
    description: str

    @classmethod
    def build(cls, spec: TeacherSpec, comm: Comm, run: Precision, micro_batches: int, logits: bool = True) -> Teacher:
        """Loads the teacher of `spec.weights` onto the device.

        Args:
            run: precision of the student.
            micro_batches: number of forward passes per batch.
            logits: whether the products of the embeddings are logits. False: similarities, without a temperature.

        Raises CheckpointError or ConfigError.
        """
        assert spec.weights is not None
        precision = _precision(spec.precision, run)
        found, model_spec, model = load_model(spec.weights, "teacher.weights", comm.device, precision.dtype)
        teacher = f"teacher.weights={spec.weights}, which gets squares of pixels"
        model_spec.image.kind.check_squares_for(teacher, "give teacher.embeddings of this model")
        size = model_spec.image.size
        dtype = str(precision.dtype).removeprefix("torch.")
        description = f"{spec.weights}, {parameter_count(model):,} parameters, {size} pixels, {dtype}"
        return cls(
            model=model,
            size=size,
            texts=TeacherTexts(model_spec.text.build_tokenizer(), model.packer),
            scale=_scale(spec, found) if logits else 1.0,
            precision=precision,
            micro_batches=micro_batches,
            digest=weights_digest(found.model),
            description=description,
        )

    @property
    def widths(self) -> list[int]:
        """Width of the teacher's embeddings, in a list as for several teachers."""
        return [self.model.embed_dim]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch with the teacher's embeddings appended to `targets`.

        Args:
            batch: a batch on the device, from a loader that reads samples for the teacher, too.
        """
        images, texts = batch.image.split(self.micro_batches, -1), batch.text.split(self.micro_batches, -1)
        with self.precision.autocast():  # calls the towers only: further outputs of the model are not needed
            image_bT = torch.cat([self.model.encode_image(part) for part in images])
            text_bT = torch.cat([self.model.encode_text(part) for part in texts])
        return replace(batch, targets=(*batch.targets, self.scale * image_bT, text_bT))


def _precision(chosen: TeacherPrecision, run: Precision) -> Precision:
    if chosen is TeacherPrecision.run:
        return run
    return Precision(getattr(torch, _DTYPES[chosen]), None, run.device_type)


def _scale(spec: TeacherSpec, found: LoadedWeights) -> float:
    (temperature,) = spec.temperatures
    if temperature is not None:
        return 1 / temperature
    if found.log_scale is None:
        raise ConfigError(
            f"teacher.weights={spec.weights} has no temperature (trained without a single one, or saved without it): "
            "give teacher.temperature, e.g. 0.01"
        )
    return math.exp(found.log_scale)


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a model's named tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
