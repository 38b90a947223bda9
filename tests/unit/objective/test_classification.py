"""The classification head: its definition, initialization as zero-shot classifier, labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.runs import VIT, small

from clipx.config.duration import Length
from clipx.data.source import BadSample, Sample
from clipx.data.spec import Classes
from clipx.distributed.comm import Comm
from clipx.evaluator.base import Embedder
from clipx.objective.base import ModelFacts, StepInputs
from clipx.objective.classification import ClassificationSpec
from clipx.objective.losses.classification import Classification, Labels
from clipx.trainer.trainer import Trainer

ONE = Comm(0, 1, 0, torch.device("cpu"))
NARROW = (*VIT, "model.embed_dim=16", "model.text.width=16", "model.text.heads=2")


def head(classes: int = 5, width: int = 4, **options: float) -> Classification:
    objective = ClassificationSpec(init_temperature=0.1, **options).build(ONE, Length(10, 10, 10))
    assert isinstance(objective, Classification)
    objective.prepare(Classes([str(i) for i in range(classes)], ("a {}",)), ModelFacts(width))
    return objective.double()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_matches_the_definition_of_cross_entropy(smoothing: float) -> None:
    torch.manual_seed(0)
    module = head(label_smoothing=smoothing)
    x_BD = F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1)
    label_B = torch.tensor([0, 4, 2, 2, 1, 0])
    loss, metrics = module(StepInputs(x_BD, torch.empty(6, 0), torch.arange(6), targets=(label_B,)))
    log_p = (10 * x_BD @ module.head_CD.T).log_softmax(1)
    target = (1 - smoothing) * F.one_hot(label_B, 5) + smoothing / 5
    torch.testing.assert_close(loss, -(target * log_p).sum(1).mean(), rtol=0, atol=1e-6)
    assert metrics["top1"] == (log_p.argmax(1) == label_B).double().mean()


def test_an_embedding_that_is_not_finite_counts_as_wrong() -> None:
    module, x_ND = head(classes=4), torch.eye(4, dtype=torch.float64)
    module.load_state_dict({**module.state_dict(), "head_CD": x_ND})
    assert module.score(x_ND, list(range(4)))["top1"] == 1
    assert module.score(x_ND.index_fill(0, torch.tensor([0, 3]), torch.nan), list(range(4)))["top1"] == 0.5


def test_the_head_is_initialized_as_the_zero_shot_classifier(tmp_path: Path) -> None:
    """The untrained head scores exactly like zero-shot evaluation."""
    Trainer(small(tmp_path / "zero", *NARROW, "duration=2st", "schedule.warmup=1st")).fit()
    fine = ("objective=classification", "model.text.lock=all", f"model.weights={tmp_path}/zero")
    t = Trainer(small(tmp_path / "fine", *NARROW, *fine, "objective.head=zeroshot", "evaluator=[zeroshot]"))
    embedder = Embedder.build(t.learner.model, t.spec.model, t.spec.data, t.comm, t.learner.precision, lambda bad: None)
    assert t.data.opened.held_out is not None
    images = embedder.images(t.data.opened.held_out, 256)
    own = t.learner.objective.score(images.image, images.labels)["top1"]
    assert own == t.evaluation.suite.evaluate(["zeroshot"], embedder)["eval/zeroshot/top1"] > 0
    t.close()
    assert isinstance(t.learner.objective, Classification)
    norms = t.learner.objective.head_CD.norm(dim=1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-6)


def test_labels_are_indices_or_names_and_a_missing_label_is_a_bad_sample() -> None:
    labels = Labels(("cat", "dog"))
    assert labels.number("dog") == labels.number(1) == 1
    (row,) = labels.rows(0, Sample(b"", ["a dog"], "dog"), "a dog")
    assert torch.equal(row, torch.tensor(1))
    for label, reason in (
        (None, "missing"),
        ("cow", "'cow' is not among the 2"),
        (2, "2 is out of range: there are 2 class names"),
        (-1, "-1 is"),
    ):
        with pytest.raises(BadSample, match=reason):
            labels.number(label)
