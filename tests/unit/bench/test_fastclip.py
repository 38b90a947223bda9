"""The FastCLIP comparison: its experiments, the registered hypotheses on known numbers, and a small one for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cases import slow_except
from helpers.runs import compose

from clipx.bench.fastclip import FastclipSpec
from clipx.bench.fastclip_parts.hypotheses import best_infonce, verdict_table
from clipx.bench.fastclip_parts.study import CONTENDER, Report
from clipx.bench.fastclip_parts.tuning import CONTENDERS, OPTIMIZERS, SUCCESSORS, recall_of
from clipx.bench.spec import BenchError
from clipx.config.registry import CONF_DIR
from clipx.errors import ConfigError
from clipx.report.seed_statistics import Curve

SMALL = "experiment=fastclip_small"


def test_the_contenders_are_those_of_the_folder() -> None:
    assert {
        path.stem for path in (CONF_DIR / "experiment/fastclip_small").glob("*.yaml")
    } == CONTENDERS.keys() | SUCCESSORS


@pytest.mark.parametrize("name", slow_except(sorted(CONTENDERS | SUCCESSORS), "fastclip_v3", "siglip"))
def test_a_contender_has_its_objective_and_tuned_values(name: str) -> None:
    specs = [compose(SMALL, f"{CONTENDER}={name}", f"data.batch_size={batch}") for batch in (16, 64, 256)]
    kinds = {spec.objective.kind for spec in specs}
    assert kinds == {"infonce" if name == "infonce_constant" else name}
    rates = [spec.optimizer.lr for spec in specs]
    assert all(1e-4 < rate < 1e-2 for rate in rates)
    key, third = (CONTENDERS | SUCCESSORS)[name]
    typed = compose(SMALL, f"{CONTENDER}={name}", "data.batch_size=64", f"{key}=0.3", "optimizer.lr=1e-4")
    assert getattr(typed.objective, key.rpartition(".")[2]) == 0.3 and typed.optimizer.lr == 1e-4
    assert third is None or compose(SMALL, f"{CONTENDER}={name}", "data.batch_size=64", f"{third}=0.7")


def test_another_batch_size_names_those_with_tuned_values() -> None:
    with pytest.raises(ConfigError, match="32 is not one of 16, 64, 256, for which this configuration is tuned"):
        compose(SMALL, "data.batch_size=32")
    own = compose(SMALL, "data.batch_size=32", "optimizer.lr=1e-3", "objective.init_temperature=0.1")
    assert own.data.batch_size == 32


@pytest.mark.parametrize("name", ["sogclr", "fastclip_v3"])
def test_gamma_is_constant_or_a_cosine_over_the_run(name: str) -> None:
    words = ("experiment=fastclip_small_gamma", f"{CONTENDER}={name}", "data.batch_size=16")
    for schedule, decay in (("constant", None), ("cosine", "100%")):
        gamma = compose(*words, f"objective.gamma.schedule={schedule}", "objective.gamma.minimum=0.2").objective.gamma
        assert (gamma.schedule, gamma.minimum, gamma.decay) == (schedule, 0.2, decay)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_each_optimizer_has_a_tuned_rate(name: str) -> None:
    words = ("experiment=fastclip_small_optimizers", f"{CONTENDER}=fastclip_v3", "data.batch_size=64")
    rates = [float(rate) for rate in OPTIMIZERS[name]]
    assert compose(*words, f"optimizer={name}").optimizer.lr in rates


# ------------------------------------------------------------------------------------------------------ hypotheses


def cell(contender: str, values: list[float], curve: Curve = (), **overrides: str) -> dict[str, Any]:
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    return {
        "overrides": {CONTENDER: contender, **keys},
        "values": {str(seed): value for seed, value in enumerate(values)},
        "mean": sum(values) / len(values),
        "curve": [{"samples": at, "mean": value, "deviation": None} for at, value in curve],
    }


def core(gaps: tuple[float, float, float], speed: float = 2.0) -> Report:
    cells = []
    for batch, gap in zip(("16", "64", "256"), gaps, strict=True):
        place = {"data__batch_size": batch, "data__mismatched": "0.2"}
        cells += [
            cell("infonce", [0.4, 0.42], **place),
            cell("infonce_constant", [0.5, 0.52], [(1000, 0.3), (20000, 0.51)], **place),
            cell("fastclip_v1", [0.5 + gap, 0.52 + gap], **place),
            cell("fastclip_v3", [0.5 + gap, 0.52 + gap], [(0, 0.0), (20000 / speed, 0.51), (20000, 0.6)], **place),
        ]
    return Report({"cells": cells})


def verdicts(**reports: Report) -> dict[str, str]:
    return {row[0]: row[3] for row in verdict_table(reports).rows}


def test_hypotheses_that_hold() -> None:
    found = verdicts(core=core((0.2, 0.1, 0.0)))
    assert found == dict.fromkeys(("H2", "H3", "H4", "H5", "H6"), "holds")
    (second, *_) = verdict_table({"core": core((0.2, 0.1, 0.0))}).rows
    assert "infonce_constant" in second[1] and second[2] == "+20.0 (+14.1 dev.)"


def test_hypotheses_that_are_refuted() -> None:
    small = verdicts(core=core((0.02, 0.1, 0.0), speed=1.2))
    assert small == dict.fromkeys(("H2", "H3", "H4", "H5", "H6"), "refuted")


def test_a_hypothesis_without_its_runs_is_not_measured() -> None:
    cells = [one for one in core((0.2, 0.1, 0.0)).cells if one["overrides"]["data.batch_size"] == "16"]
    found = verdicts(core=Report({"cells": cells}))
    assert (found["H2"], found["H4"]) == ("holds", "not measured")
    assert set(verdicts(core=Report({"cells": []})).values()) == {"not measured"}
    of_one_size = [{**one, "overrides": {CONTENDER: one["overrides"][CONTENDER]}} for one in cells]
    assert set(verdicts(core=Report({"cells": of_one_size})).values()) == {"not measured"}, "its batch is not known"


def test_the_better_infonce_is_the_baseline() -> None:
    key = {"data.batch_size": "16", "data.mismatched": "0.2"}
    assert best_infonce(core((0, 0, 0)), key) == "infonce_constant"
    assert best_infonce(Report({"cells": [cell("infonce", [0.9])]}), {}) == "infonce"


def test_gamma_hypotheses_compare_equal_final_values() -> None:
    def report(cosine: float, sogclr: float) -> Report:
        cells = []
        for low in ("0.2", "0.5", "0.8"):
            for name in ("fastclip_v1", "fastclip_v3", "sogclr"):
                for schedule, value in (("cosine", cosine), ("constant", sogclr if name == "sogclr" else 0.5)):
                    place = {"objective__gamma__minimum": low, "objective__gamma__schedule": schedule}
                    cells.append(cell(name, [value, value + 0.01], **place))
        return Report({"cells": cells})

    assert verdicts(gamma=report(0.6, 0.55)) == {"H1": "holds", "H7": "holds"}
    assert verdicts(gamma=report(0.5, 0.5)) == {"H1": "refuted", "H7": "holds"}
    assert verdicts(gamma=report(0.4, 0.3)) == {"H1": "holds", "H7": "refuted"}


# ------------------------------------------------------------------------------------------------------ for real


def test_the_recall_of_a_run_is_the_mean_of_both_directions(tmp_path: Path) -> None:
    counters = {"step": 1, "samples": 16, "epoch": 1, "seconds": 1}
    i2t, t2i = (f"eval/retrieval/{way}/recall@1" for way in ("image_to_text", "text_to_image"))
    rows = [{**counters, i2t: 0.1, t2i: 0.1}, {**counters, "step": 2, i2t: 0.2, t2i: 0.4}, {**counters, "step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recall_of(tmp_path) == pytest.approx(0.3)
    with pytest.raises(BenchError, match="has no recall@1"):
        recall_of(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parts": ["all"]},
            "parts=all is not a part: choose from core, gamma, optimizers, successors, openclipart, tun",
        ),
        ({"parts": []}, r"parts=\[\] measures nothing"),
        ({"samples": 100}, "samples=100 must be at least 256"),
        ({"gallery": 1}, "gallery=1 must be at least 2"),
        ({"processes": -1}, "processes=-1 must be 0"),
        ({"device": "cuda"}, "device=cuda has no effect"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FastclipSpec(run_dir="x", **options)


@pytest.mark.slow
def test_a_small_comparison_runs_continues_and_reports(tmp_path: Path) -> None:
    said: list[str] = []
    swept = [f"{CONTENDER}=infonce_constant,fastclip_v1", "data.batch_size=64", "data.mismatched=0.2", "seed=0,1"]
    spec = FastclipSpec(
        run_dir=str(tmp_path), overrides=[*swept, "duration=2ep"], samples=256, gallery=32, trunk="60st", processes=2
    )
    found = spec.run(said.append)
    cells = found.details["core"]
    assert {one["overrides"][CONTENDER] for one in cells} == {"infonce_constant", "fastclip_v1"}
    assert all(len(one["values"]) == 2 and 0 <= one["mean"] <= 1 for one in cells)
    assert found.figures["hypotheses"]["H2"] == "not measured", "registered for a batch of 16"
    assert (tmp_path / "core.html").is_file()
    started = sum(line.startswith(("training", "storing")) for line in said)
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("core/*/metrics.jsonl")}
    again = spec.run(said.append)
    assert again.details == found.details
    assert sum(line.startswith(("training", "storing")) for line in said) == started == 3
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished runs are not repeated"
