"""Speeds of a device from the results.json of a benchmark, `plan.measured`: those of `clipx.bench step` and `gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from clipx.errors import ConfigError, require

if TYPE_CHECKING:
    from clipx.extra.plan.command import PlanSpec


class MeasuredStep(BaseModel):
    """Row of a training step in `details.steps`."""

    name: str
    implementation: str
    model: str
    precision: str
    compiled: bool
    overrides: list[str]
    batch: int
    samples_per_second: float
    tflops_packed: float  # TFLOP/s of the images and of the tokens that the captions have


class _Details(BaseModel):
    steps: list[MeasuredStep]


class Measurements(BaseModel):
    """Results of a benchmark of training steps."""

    date: str
    machine: dict[str, Any]
    details: _Details

    @classmethod
    def read(cls, path: str) -> Measurements:
        """Raises ConfigError for a file that is missing or has another format."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"measured={path} cannot be read: {error.strerror or error}") from error
        except ValidationError as error:
            reason = error.errors()[0]
            where = ".".join(map(str, reason["loc"]))
            raise ConfigError(
                f"measured={path} is not results.json of `clipx.bench step` or `clipx.bench gpu` ({where}: "
                f"{reason['msg']}): give one of these"
            ) from error

    def best(self, spec: PlanSpec) -> MeasuredStep:
        """Returns the fastest step of clipx with the model and the precision of a plan, on its device. Raises
        ConfigError if there is none."""
        path, gpus = spec.measured, [str(name) for name in self.machine.get("gpus", [])]
        require(
            any(spec.gpu in name for name in gpus),
            f"measured={path} was measured on {', '.join(gpus) or 'a CPU'}, not on gpu={spec.gpu}: give the gpu of the "
            "file, or another file",
        )
        ours = [step for step in self.details.steps if step.implementation == "clipx" and _plain(step)]
        known = sorted({f"model={step.model} precision={step.precision}" for step in ours})
        found = [step for step in ours if (step.model, step.precision) == (spec.model.name, spec.precision.kind)]
        require(
            bool(found),
            f"measured={path} has no step of model={spec.model.name} precision={spec.precision.kind}: it has "
            f"{'; '.join(known) or 'none of clipx'}; or give mfu",
        )
        same = [step for step in found if step.compiled == (spec.compile.towers != "false")] or found
        return max(same, key=lambda step: step.samples_per_second)

    def source(self, step: MeasuredStep) -> str:
        """Returns where a speed comes from, for the table of assumptions."""
        compiled = "compiled" if step.compiled else "not compiled"
        gpu = self.machine["gpus"][0]
        rate = f"{step.samples_per_second:,.5g} samples/s of {step.model} in batches of {step.batch:,}"
        return f"measured on {gpu}, {self.date[:10]}: {rate}, {step.precision}, {compiled}"


def _plain(step: MeasuredStep) -> bool:
    """Returns whether a step computes each sample once and its captions alone, which is what a plan counts."""
    other = ("data.micro_batches", "model.image.checkpointing", "model.text.checkpointing", "model.text.packed")
    return not any(word.startswith(other) for word in step.overrides)
