"""Resumes a run from each of its steps and compares the ends bit for bit. Also a script, for several ranks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from helpers.runs import VIT, small, tensors, untimed_rows

from clipx.trainer.trainer import Trainer

OBJECTIVES = (
    *("infonce", "dcl", "siglip", "sogclr", "isogclr"),
    *("fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3", "neuclip", "captions"),
)
# The prototypes are replaced in steps 0, 1, 3 and 4.
_PROTOTYPES = ("objective.prototypes=50", "objective.updates=2", "objective.restart=3st", "objective.rho=2")
STEPS = 5
# Five steps of 36 in epochs of 75 samples: samples return, γ falls, and steps 2 and 4 are in the middle of an epoch.
# Dropout draws random numbers, in two micro-batches.
FIVE = (
    *VIT,
    "+model.image.options.proj_drop_rate=0.1",
    *("data.samples=75", "data.batch_size=36", "data.micro_batches=2", f"duration={STEPS}st"),
    *("checkpoint.every=1st", "checkpoint.keep_last=9", "evaluator=[retrieval]", "evaluator.retrieval.every=2st"),
)


_CAPTIONS = ("objective=siglip", "objective.same_caption=mask", "data.captions_per_step=3", "data.sub_captions=2")


def options(objective: str) -> tuple[str, ...]:
    """Returns the options of a run. captions: several captions and sub-captions of each sample."""
    if objective == "captions":
        return (*FIVE, *_CAPTIONS)
    rho = ("objective.rho=2",) if objective in ("isogclr", "fastclip_v2", "fastclip_v3") else ()  # below log(75 - 1)
    return (*FIVE, f"objective={objective}", *rho, *(_PROTOTYPES if objective == "neuclip" else ()))


def end(run_dir: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Returns all tensors of the last checkpoint, and all logged metrics that do not depend on the clock."""
    return tensors(run_dir, STEPS), untimed_rows(run_dir)


def differences(folder: Path, *overrides: str, steps: range = range(1, STEPS)) -> list[str]:
    """Returns by step the differences from the run that never stopped. Collective."""
    straight = folder / "straight"
    trainer = Trainer(small(straight, *overrides))
    trainer.fit()
    expected, expected_rows = end(straight)
    assert any("eval/" in name for row in expected_rows for name in row)
    found = []
    for step in steps:
        run_dir = folder / f"from-{step}"
        trainer.comm.run_on_main(lambda run_dir=run_dir: shutil.copytree(straight, run_dir) and None)
        again = Trainer(small(run_dir, *overrides, f"resume=step:{step}"))
        assert again.steps_done == step
        again.fit()
        ended, rows = end(run_dir)
        assert ended.keys() == expected.keys()
        found += [f"{step}: {name}" for name in expected if not torch.equal(ended[name], expected[name])]
        found += [f"{step}: metrics.jsonl"] if rows != expected_rows else []
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    told = {name: differences(place / name, *options(name)) for name in sys.argv[2:]}
    (place / f"differences.{torch.distributed.get_rank()}.json").write_text(json.dumps(told))
