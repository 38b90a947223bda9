"""No batch of an evaluation makes the host wait for the device. test_fake_cuda.py has the steps of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.host_reads import HostReads
from helpers.runs import VIT, small
from torch import nn

from clipx.model.transfer import HostCopy
from clipx.trainer.trainer import Trainer


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


def test_the_count_sees_each_kind_of_read() -> None:
    weight = nn.Linear(2, 2)
    with HostReads([weight]) as reads:
        x = weight.weight.detach() * 2
        host = torch.arange(3)
        host.tolist(), host[host > 1].sum().item()
        assert reads.found == []
        float(x.sum()), bool((x > 100).any()), x[x > 0], x.nonzero(), torch.equal(x, x), x.tolist(), x.cpu(), x.numpy()
        x.masked_select(x > 0), torch.unique(x), x.new_tensor(1.0), torch.tensor(1.0, device="cpu")
        x[x > 0] = x[x > 0] * 2
    assert len(reads.found) == 14


def test_a_batch_of_an_evaluation_reads_nothing(tmp_path: Path, reads_of_copies: list[int]) -> None:
    """The number of reads of an evaluation does not depend on the number of its batches."""
    trainer = Trainer(small(tmp_path / "run", *VIT, "evaluator=[retrieval,zeroshot]"))
    counts = []
    for size in (48, 8):
        for evaluator in trainer.spec.evaluator.values():
            evaluator.batch_size = size
        with HostReads([trainer.learner.model]) as reads:
            trainer.evaluation.overdue = list(trainer.spec.evaluator)
            trainer.evaluation.run(trainer.learner, lambda bad: None, lambda: None)
        counts.append(len(reads.found))
    trainer.close()
    assert counts[0] == counts[1] < 20
