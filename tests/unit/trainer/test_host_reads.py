"""No operation of a training step makes the host wait for the device, and none of an evaluation's batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.host_reads import HostReads
from helpers.loading import batch_of
from helpers.objective_cases import SETTINGS, of_run
from helpers.runs import VIT, small
from helpers.steps import take_step
from helpers.texts import captions
from torch import nn

from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.model.spec import Varying
from clipx.model.transfer import HostCopy
from clipx.report.console import Progress
from clipx.trainer.learner import Learner
from clipx.trainer.metrics import Meter
from clipx.trainer.trainer import Trainer

COMM = Comm(0, 1, 0, torch.device("cpu"))
SIZE = 8
# test_fake_cuda.py has the other objectives, optimizers and formats.
CASES = [
    ("objective=neuclip", *SETTINGS["neuclip"], "optimizer.non_finite=skip", "optimizer.clip_norm=1"),
    ("precision=amp_bf16", "data.micro_batches=2", "optimizer.ema_decay=0.9", "objective=fastclip_v1"),
]


@pytest.fixture
def reads_of_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the copies that nothing waits for be read, and returns a list with one entry for each."""
    copies: list[int] = []

    def start(self: HostCopy, tensor: torch.Tensor) -> None:
        self._values, self._event = tensor.detach(), None

    def read(self: HostCopy) -> list[float]:
        copies.append(1)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return self._values.tolist()

    monkeypatch.setattr(HostCopy, "__init__", start)
    monkeypatch.setattr(HostCopy, "read", read)
    return copies


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_steps_between_logs_read_nothing(
    overrides: tuple[str, ...], tmp_path: Path, reads_of_copies: list[int]
) -> None:
    spec = small(tmp_path, *VIT, f"data.batch_size={SIZE}", "data.samples=64", *overrides)
    learner = Learner(spec, COMM, Length(epoch=64, batch=SIZE, total=640), Varying(spec.model.drops_patches))
    meter, side = Meter(COMM), spec.model.image.size

    def step(number: int, detailed: bool = False) -> None:
        image = torch.randint(0, 256, (SIZE, 3, side, side), dtype=torch.uint8)
        tokens = captions(SIZE, spec.model.text.context_length, seed=number)
        batch = of_run(batch_of(image, tokens, torch.arange(SIZE)), spec)
        reads.mark(batch.image.rows[0])
        meter.add(take_step(learner, batch, number, detailed), SIZE, 0, learner.non_finite.found_inf)

    reads = HostReads([m for m in (learner.model, learner.weights, learner.objective) if isinstance(m, nn.Module)])
    step(0)  # creates the optimizer's state
    with reads:
        step(1)
        step(2)
        step(3, detailed=True)
        assert reads.found == []
        learner.settle()
        found = meter.read()
    assert [name.partition(" ")[0] for name in reads.found] == ["tolist"], "a log reads all metrics at once"
    assert len(reads_of_copies) == 4
    assert found["loss"] > 0


def test_a_batch_of_an_evaluation_reads_nothing(tmp_path: Path, reads_of_copies: list[int]) -> None:
    """The number of reads of an evaluation does not depend on the number of its batches."""
    counts = []
    for size in (48, 8):
        sizes = [f"evaluator.{name}.batch_size={size}" for name in ("retrieval", "zeroshot")]
        trainer = Trainer(small(tmp_path / f"run{size}", *VIT, "evaluator=[retrieval,zeroshot]", *sizes))
        with HostReads([trainer.learner.model]) as reads:
            trainer.evaluation.overdue = list(trainer.spec.evaluator)
            trainer.evaluation.run(trainer.learner, lambda bad: None, lambda: None, Progress(shown=False))
        counts.append(len(reads.found))
        trainer.close()
    assert counts[0] == counts[1] < 20
