"""FastCLIP's study: its contenders compose, its hypotheses on known numbers, its command on a small case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.cases import slow_except
from helpers.examples import load
from helpers.runs import compose, run

from clipx.config.registry import CONF_DIR
from clipx.errors import ConfigError
from clipx.report.seed_statistics import Curve

SCRIPT = ROOT / "examples/fastclip_study.py"
study = load("fastclip_study.py")

TUNED = {**study.CONTENDERS, **study.SUCCESSORS}
SMALL = "experiment=fastclip_small"
HYPOTHESES = ("H2", "H3", "H4", "H5", "H6")


def test_the_contenders_are_those_of_the_folder() -> None:
    assert {path.stem for path in (CONF_DIR / "experiment/fastclip_small").glob("*.yaml")} == set(TUNED)


@pytest.mark.parametrize("name", slow_except(sorted(TUNED), "fastclip_v3", "siglip"))
def test_a_contender_has_its_objective_and_tuned_values(name: str) -> None:
    chosen = (SMALL, f"{study.CONTENDER}={name}")
    specs = [compose(*chosen, f"data.batch_size={batch}") for batch in study.BATCHES]
    assert {spec.objective.kind for spec in specs} == {"infonce" if name == "infonce_constant" else name}
    assert all(1e-4 < spec.optimizer.lr < 1e-2 for spec in specs)
    temperature, _, *third = TUNED[name]
    typed = compose(*chosen, f"{temperature}=0.3", "optimizer.lr=1e-4", "data.batch_size=64")
    assert getattr(typed.objective, temperature.rpartition(".")[2]) == 0.3 and typed.optimizer.lr == 1e-4
    compose(*chosen, "data.batch_size=64", *(f"{key}=0.7" for key in third))


def test_another_batch_size_names_those_with_tuned_values() -> None:
    with pytest.raises(ConfigError, match="32 is not one of 16, 64, 256, for which this configuration is tuned"):
        compose(SMALL, "data.batch_size=32")
    own = compose(SMALL, "data.batch_size=32", "optimizer.lr=1e-3", "objective.init_temperature=0.1")
    assert own.data.batch_size == 32


@pytest.mark.parametrize("name", ["sogclr", "fastclip_v3"])
def test_gamma_is_constant_or_a_cosine_over_the_run(name: str) -> None:
    words = ("experiment=fastclip_small_gamma", f"{study.CONTENDER}={name}", "data.batch_size=16")
    for schedule, decay in (("constant", None), ("cosine", "100%")):
        gamma = compose(*words, f"objective.gamma.schedule={schedule}", "objective.gamma.minimum=0.2").objective.gamma
        assert (gamma.schedule, gamma.minimum, gamma.decay) == (schedule, 0.2, decay)


@pytest.mark.parametrize("name", study.OPTIMIZERS)
def test_each_optimizer_has_a_tuned_rate(name: str) -> None:
    words = ("experiment=fastclip_small_optimizers", f"{study.CONTENDER}=fastclip_v3", "data.batch_size=64")
    assert compose(*words, f"optimizer={name}").optimizer.lr in map(float, study.OPTIMIZERS[name])


def cell(contender: str, values: list[float], curve: Curve = (), **overrides: str) -> dict[str, Any]:
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    return {
        "overrides": {study.CONTENDER: contender, **keys},
        "values": {str(seed): value for seed, value in enumerate(values)},
        "mean": sum(values) / len(values),
        "curve": [{"samples": at, "mean": value, "deviation": None} for at, value in curve],
    }


def core(*gaps: float, speed: float = 2.0) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for batch, gap in zip(study.BATCHES, gaps, strict=True):
        place = {"data__batch_size": batch, "data__mismatched": "0.2"}
        cells += [
            cell("infonce", [0.4, 0.42], **place),
            cell("infonce_constant", [0.5, 0.52], [(1000, 0.3), (20000, 0.51)], **place),
            cell("fastclip_v1", [0.5 + gap, 0.52 + gap], **place),
            cell("fastclip_v3", [0.5 + gap, 0.52 + gap], [(0, 0.0), (20000 / speed, 0.51), (20000, 0.6)], **place),
        ]
    return cells


def verdicts(**parts: list[dict[str, Any]]) -> dict[str, str]:
    return {number: verdict for number, _, _, verdict in study.verdicts(parts)}


def test_hypotheses_hold_or_are_refuted() -> None:
    assert verdicts(core=core(0.2, 0.1, 0.0)) == dict.fromkeys(HYPOTHESES, "holds")
    (_, text, measured, _), *_ = study.verdicts({"core": core(0.2, 0.1, 0.0)})
    assert "fastclip_v1 - infonce_constant" in text and measured == "+20.0 (+14.1 dev.)", "the better InfoNCE"
    assert verdicts(core=core(0.02, 0.1, 0.0, speed=1.2)) == dict.fromkeys(HYPOTHESES, "refuted")


def test_a_hypothesis_without_its_runs_is_not_measured() -> None:
    cells = [one for one in core(0.2, 0.1, 0.0) if one["overrides"]["data.batch_size"] == "16"]
    found = verdicts(core=cells)
    assert (found["H2"], found["H4"]) == ("holds", "not measured")
    of_one_size = [{**one, "overrides": {study.CONTENDER: one["overrides"][study.CONTENDER]}} for one in cells]
    for nothing in ([], of_one_size):  # in the second one the batch size is not known
        assert verdicts(core=nothing) == dict.fromkeys(HYPOTHESES, "not measured")


@pytest.mark.parametrize(
    ("cosine", "sogclr", "expected"),
    [(0.6, 0.55, ("holds", "holds")), (0.5, 0.5, ("refuted", "holds")), (0.4, 0.3, ("holds", "refuted"))],
)
def test_gamma_hypotheses_compare_equal_final_values(cosine: float, sogclr: float, expected: tuple[str, str]) -> None:
    cells = []
    for low in study.GAMMAS:
        for name in ("fastclip_v1", "fastclip_v3", "sogclr"):
            for schedule, value in (("cosine", cosine), ("constant", sogclr if name == "sogclr" else 0.5)):
                place = {"objective__gamma__minimum": low, "objective__gamma__schedule": schedule}
                cells.append(cell(name, [value, value + 0.01], **place))
    assert verdicts(gamma=cells) == dict(zip(("H1", "H7"), expected, strict=True))


def test_the_recall_of_a_run_is_the_mean_of_both_directions(tmp_path: Path) -> None:
    counters = {"step": 1, "samples": 16, "epoch": 1, "seconds": 1}
    rows = [counters | dict.fromkeys(study.RECALL, 0.1), counters | dict(zip(study.RECALL, (0.2, 0.4), strict=True))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, counters]))
    assert study.recall_of(tmp_path) == pytest.approx(0.3)
    with pytest.raises(SystemExit, match="has no recall@1"):
        study.recall_of(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "all"), "invalid choice: 'all' (choose from"),
        (("--samples", "255"), "--samples 255 must be at least 256"),
        (
            ("--gallery", "961"),
            "has the data of --samples 1000 --gallery 960 --trunk 9ep: give these options, or another",
        ),
    ],
)
def test_bad_options_are_errors(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastclip_study.py", str(tmp_path)])
    study.options()
    sys.argv += words
    with pytest.raises(SystemExit) as error:
        study.options()
    assert error.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_a_url_as_folder_is_an_error_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fastclip_study.py", "s3://key:hunter2@bucket/study"])
    with pytest.raises(SystemExit) as error:
        study.options()
    said = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 2 and "FOLDER=s3://bucket/study is a URL: give a local path" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_small_study_continues_and_reports(tmp_path: Path) -> None:
    swept = [f"{study.CONTENDER}=infonce_constant,fastclip_v1", "data.batch_size=64", "data.mismatched=0.2", "seed=0,1"]
    small = ("--samples", "256", "--gallery", "32", "--trunk", "60st", "--processes", "2")
    words = (sys.executable, str(SCRIPT), str(tmp_path), *small, "--overrides", *swept)
    failed = run(*words, "duration=0ep", check=False)
    assert (
        failed.returncode == 1 and failed.stderr.count("\n") == 1 and f"see {tmp_path}/logs/core.log" in failed.stderr
    )
    first = run(*words, "duration=2ep")
    found = json.loads((tmp_path / "results.json").read_text())
    cells = found["parts"]["core"]["cells"]
    assert {one["overrides"][study.CONTENDER] for one in cells} == {"infonce_constant", "fastclip_v1"}
    assert all(len(one["values"]) == 2 and 0 <= one["mean"] <= 1 for one in cells)
    assert found["hypotheses"][0]["verdict"] == "not measured", "registered for a batch of 16"
    assert (tmp_path / "core.html").is_file() and "fastclip_v1" in first.stdout
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/**/*.jsonl")}
    again = run(*words, "duration=2ep")
    assert [line.split()[1] for line in again.stdout.splitlines()[:2]] == ["core", "report-core"]
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished runs are not repeated"
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["core"]["cells"] == cells
