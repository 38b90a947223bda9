"""`resolve`: the spec of a run as it is saved names what only its start finds out, and is the typed one otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import VIT, small

from clipx.config.saved import flatten, from_dict, to_dict
from clipx.config.specs import frozen
from clipx.data.shapes import ShapesSpec
from clipx.distributed.comm import Comm
from clipx.precision.spec import AmpBf16Spec, Fp32Spec
from clipx.run.directory import RunDir
from clipx.trainer.spec import RunSpec
from clipx.trainer.start import resolve
from clipx.trainer.trainer import Trainer

CPU = torch.device("cpu")
HERE = Comm(0, 1, 0, CPU)
OWN = [0.1, 0.2, 0.3]


@frozen
class Moving(ShapesSpec):
    """Data with a number of samples that moves, from the typed 64 to 65."""

    def pinned(self, saved: Mapping[str, Any]) -> Moving:
        return replace(self, samples=saved.get("samples", 65))


class OtherRank(Comm):
    """Rank 1, whose rank 0 has typed another directory and other values."""

    def run_on_main(self, call: Callable[[], Any]) -> Any:
        run_dir, normalization, data = call()
        return f"{run_dir} of rank 0", {**normalization, "mean": [0.5] * 3, "std": [0.6] * 3}, {**data, "samples": 66}


def typed(run_dir: Path, *words: str) -> RunSpec:
    spec = small(run_dir, *VIT, "precision=auto", *words)
    assert isinstance(spec.data, ShapesSpec)
    return replace(spec, data=Moving(**{**{f: getattr(spec.data, f) for f in to_dict(spec.data)}, "samples": 64}))


def changed(spec: RunSpec, found: RunSpec) -> dict[str, Any]:
    before, now = dict(flatten(to_dict(spec))), dict(flatten(to_dict(found)))
    return {key: now.get(key) for key in sorted({*before, *now}) if before.get(key) != now.get(key)}


def test_a_new_run_gets_its_pinned_data_and_the_format_of_its_device_and_nothing_else(tmp_path: Path) -> None:
    spec = typed(tmp_path / "run")
    found = resolve(spec, HERE)
    assert changed(spec, found) == {"data.samples": 65, "precision.kind": "fp32", "precision.tf32": False}
    assert isinstance(found.precision, Fp32Spec) and spec.precision.kind == "auto", "the typed spec is unchanged"
    assert resolve(found, HERE).precision == found.precision


def test_a_resumed_run_keeps_its_normalization(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.save_config(small(run.path, *VIT, f"model.image.mean={OWN}", f"model.image.std={OWN}"))
    run.checkpoints.mkdir()
    spec = typed(run.path, "model.image.weights=/gone", "resume=auto")
    assert spec.model.image.mean is None
    image = resolve(spec, HERE).model.image
    assert (image.mean, image.std) == (OWN, OWN)
    given = typed(run.path, "model.image.weights=/gone", "resume=auto", "model.image.mean=[0.7,0.7,0.7]")
    assert resolve(given, HERE).model.image.normalization == {"mean": [0.7] * 3, "std": OWN}


def test_another_rank_gets_what_rank_0_finds_out_and_keeps_what_it_typed(tmp_path: Path) -> None:
    spec = typed(tmp_path / "run", "model.image.weights=/gone", f"model.image.mean={OWN}", f"model.image.std={OWN}")
    spec = replace(spec, model=replace(spec.model, image=replace(spec.model.image, std=None)))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    RunDir(tmp_path / "run").save_config(spec)
    found = resolve(replace(spec, resume="auto"), OtherRank(1, 2, 1, CPU))
    assert found.run_dir == f"{tmp_path}/run of rank 0"
    assert found.model.image.normalization == {"mean": OWN, "std": [0.6] * 3}
    assert found.data.captions_per_step == spec.data.captions_per_step
    assert to_dict(found.data)["samples"] == 66


def test_the_configuration_of_a_run_holds_what_it_was_resolved_to(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path / "run", *VIT, "precision=auto", "duration=2st"))
    trainer.close()
    saved = from_dict(RunSpec, RunDir(tmp_path / "run").saved())
    assert saved == trainer.spec
    assert saved.precision == Fp32Spec() and saved.run_dir == str(tmp_path / "run")
    assert saved.model.image.mean is not None and "precision=auto chose fp32" in trainer.run.facts["device"]


@pytest.mark.parametrize("format", [AmpBf16Spec(), Fp32Spec()])
def test_a_run_is_evaluated_in_float32_on_a_device_without_bfloat16(format: AmpBf16Spec | Fp32Spec) -> None:
    assert format.elsewhere(CPU) == Fp32Spec()
    assert format.on(CPU) == format, "trained as typed"
