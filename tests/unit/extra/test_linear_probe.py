"""The linear probe: fit against scikit-learn, search of the penalty, data checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.color_model import Colours, embedder
from helpers.savers import run_in_processes
from sklearn.linear_model import LogisticRegression

from clipx.data.spec import Dataset
from clipx.distributed.comm import Comm
from clipx.errors import DataError
from clipx.extra.linear_probe import evaluator as linear_probe
from clipx.extra.linear_probe.evaluator import LinearProbeSpec, Probe, _every_of_class

ALONE = Comm(0, 1, 0, torch.device("cpu"))


def clouds(n: int = 200, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns overlapping unit vectors around a centre per class with a constant column, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    centre_CD = torch.randn(classes, 6, generator=generator, dtype=torch.float64)
    y_N = torch.randint(0, classes, (n,), generator=generator)
    x_ND = F.normalize(centre_CD[y_N] + torch.randn(n, 6, generator=generator, dtype=torch.float64), dim=-1)
    return torch.cat([x_ND, torch.ones(n, 1, dtype=torch.float64)], 1), y_N


@pytest.mark.parametrize("l2", [0.1, 1.0, 30.0])
def test_the_fit_equals_logistic_regression_of_scikit_learn(l2: float) -> None:
    x_ND, y_N = clouds()
    weight_CD = Probe(ALONE, 4, lambda: None).fit(x_ND, y_N, l2)
    theirs = LogisticRegression(C=1 / l2, tol=1e-9, max_iter=10_000).fit(x_ND[:, :-1].numpy(), y_N.numpy())
    np.testing.assert_allclose(weight_CD[:, :-1].numpy(), theirs.coef_, atol=1e-3)
    chance = torch.softmax(x_ND @ weight_CD.T, 1).numpy()
    np.testing.assert_allclose(chance, theirs.predict_proba(x_ND[:, :-1].numpy()), atol=2e-4)


def fitted_in_blocks(comm: Comm, size: int) -> list[list[float]]:
    linear_probe._BLOCK = size
    return Probe(comm, 4, lambda: None).fit(*clouds(), 1.0).flatten().tolist()  # type: ignore[no-any-return]


def test_ranks_share_the_images_and_fit_one_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_probe, "_BLOCK", 8192)
    alone = pytest.approx(fitted_in_blocks(ALONE, 8192), abs=1e-5)
    assert run_in_processes(2, tmp_path, fitted_in_blocks, 30) == [alone, alone]


def test_the_penalty_is_selected_on_images_that_are_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    held_N = _every_of_class(torch.tensor([0, 1] * 10 + [2] * 4), 5)
    assert held_N.nonzero()[:, 0].tolist() == [8, 9, 18, 19], "every fifth sample of each class"
    x_ND, y_N = clouds()
    fitted: list[torch.Tensor] = []

    def fit(self: Probe, x_ND: torch.Tensor, y_N: torch.Tensor, l2: float) -> torch.Tensor:
        fitted.append(x_ND)
        return torch.zeros(4, 7, dtype=torch.float64)

    monkeypatch.setattr(Probe, "fit", fit)
    LinearProbeSpec(kind="linear_probe")._best(Probe(ALONE, 4, lambda: None), x_ND, y_N)
    others_ND = x_ND[~_every_of_class(y_N, 5)]
    assert fitted and all(torch.equal(x_ND, others_ND) for x_ND in fitted)


def colours(shown: list[str], labels: list[int | str | None]) -> Colours:
    return Colours(shown, [[c] for c in shown], labels)


def data(train_labels: list[int | str | None] | None = None, test_labels: list[int | str] | None = None) -> Dataset:
    """Returns colours under other names, which only a probe can learn."""
    shown = ["red", "green", "blue"] * 5
    names = {"red": "a", "green": "b", "blue": "c"}
    train = colours(shown, train_labels or [names[c] for c in shown])
    return Dataset(train, colours(shown[:6], list(test_labels or [names[c] for c in shown[:6]])), None)


def test_labels_are_learned_on_training_and_scored_on_held_out_images() -> None:
    spec = LinearProbeSpec(kind="linear_probe")
    found = spec.evaluate(embedder(), data())
    assert spec.evaluate(embedder(), data()) == found
    assert {name: found[name] for name in ("top1", "top5", "mean_per_class_recall")} == pytest.approx(
        {"top1": 1, "top5": 1, "mean_per_class_recall": 1}
    )
    assert found["chance"] == pytest.approx(1 / 3)
    wrong = spec.evaluate(embedder(), data(test_labels=["b", "c", "a"] * 2))
    assert wrong["top1"] == 0


def test_embeddings_that_are_not_finite_are_not_fitted_and_count_as_wrong() -> None:
    broken = embedder()
    encode, calls = broken.model.encode_image, list[int]()

    def encode_image(image: torch.Tensor) -> torch.Tensor:
        calls.append(len(image))
        return encode(image).index_fill(0, torch.tensor([1]), torch.nan)

    broken.model.encode_image = encode_image  # type: ignore[method-assign, assignment]
    found = LinearProbeSpec(kind="linear_probe", l2=1e-3).evaluate(broken, data())
    assert calls == [15, 6] and found["top1"] == pytest.approx(5 / 6)
    broken.model.encode_image = lambda image: encode(image) * torch.nan  # type: ignore[method-assign, assignment]
    with pytest.raises(DataError, match="no embedding of a training image is finite"):
        LinearProbeSpec(kind="linear_probe").evaluate(replace(broken, _images={}), data())
