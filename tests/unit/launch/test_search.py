"""Searches with Optuna: the search space, the study in the sweep's folder, and pruning by recorded metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import optuna
import pytest
from helpers.sweeps import make_sweep, states
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState

from clipx.config.compose import compose_config, isolated_hydra
from clipx.errors import ClipxError, ConfigError
from clipx_launch.options import LAUNCHER
from clipx_launch.point import Result
from clipx_launch.search.check import jobs_of
from clipx_launch.search.search import _OptunaSearch, require_progress
from clipx_launch.search.space import combinations, distribution, example, parse, space_of, suggest
from clipx_launch.search.spec import Direction, OptunaSpec, Pruner, Sampler
from clipx_launch.search.study import check_arguments, open_study, study_file
from hydra_plugins.clipx_plugins import ClipxLauncher

METRIC = "eval/zeroshot/top1"
LR = {"optimizer.lr": FloatDistribution(1e-4, 1e-2, log=True)}

# ------------------------------------------------------------------------------------------------------ the space


@pytest.mark.parametrize(
    ("typed", "whole", "found"),
    [
        ("a=interval(1e-4,1e-2)", False, FloatDistribution(1e-4, 1e-2)),
        ("a=tag(log,interval(1e-4,1e-2))", False, FloatDistribution(1e-4, 1e-2, log=True)),
        ("a=interval(1,8)", True, IntDistribution(1, 8)),
        ("a=range(0,0.6,0.1)", False, FloatDistribution(0, 0.5, step=0.1)),
        ("a=x,'y z',null,true", True, CategoricalDistribution(("x", "'y z'", "null", True))),
    ],
)
def test_hydras_sweep_syntax_spans_the_space(typed: str, whole: bool, found: object) -> None:
    (override,), fixed = parse([typed, "seed=1"], {})
    assert distribution(override, whole) == found
    assert fixed == ["seed=1"]
    assert example(override).startswith(typed.partition("=")[0] + "=")


def test_the_key_decides_whether_an_interval_has_whole_numbers() -> None:
    swept, _ = parse(["data.batch_size=interval(16,64)", "optimizer.weight_decay=interval(0,1)"], {})
    cfg = compose_config("train", ["data=digits", *map(example, swept)], ())
    assert space_of(swept, cfg) == {
        "data.batch_size": IntDistribution(16, 64),
        "optimizer.weight_decay": FloatDistribution(0, 1),
    }


def test_values_of_a_yaml_file_are_read_as_typed_ones() -> None:
    written = {"seed": [1, 2], "resume": None, "report": True, "optimizer.lr": "interval(0,1)", "objective": "a,b"}
    swept, fixed = parse(["optimizer.lr=1,2"], written)
    assert [override.input_line for override in swept] == ["objective=a,b", "optimizer.lr=1,2"]
    assert fixed == ["seed=[1, 2]", "resume=null", "report=true"]


def test_a_pattern_selects_options_of_a_group() -> None:
    with isolated_hydra():
        loader = GlobalHydra.instance().config_loader()
    (override,), _ = parse(["objective=glob(fastclip_*)"], {}, loader)
    found = distribution(override, whole=False)
    assert isinstance(found, CategoricalDistribution) and {"fastclip_v1", "fastclip_v3"} < set(found.choices)


def test_a_grid_has_all_combinations_in_order() -> None:
    swept, _ = parse(["a=range(0.0,0.3,0.1)", "b=y,x"], {})
    expected = [{"a": a, "b": b} for a in (0.0, 0.1, 0.2) for b in ("y", "x")]
    assert combinations(swept) == expected
    swept, _ = parse(["a=range(0.0,1,0.1)"], {})
    assert [found["a"] for found in combinations(swept)] == [step / 10 for step in range(10)]


@pytest.mark.parametrize("key", ["parallelism", "array_parallelism"])
def test_a_batch_has_as_many_trials_as_the_launcher_runs_at_a_time(key: str) -> None:
    launcher = {"_target_": LAUNCHER, "kind": "slurm", key: 3}
    config = OmegaConf.create({"hydra": {"launcher": launcher, "runtime": {"choices": {"hydra/launcher": "site"}}}})
    assert jobs_of(config) == 3
    config.hydra.launcher[key] = None
    with pytest.raises(ConfigError, match=rf"trials that are launched together: give hydra\.launcher\.{key}$"):
        jobs_of(config)


# ------------------------------------------------------------------------------------------------------ the study


def opened(folder: Path, spec: OptunaSpec, *fixed: str, space: Any = LR, metric: str = METRIC) -> optuna.Study:
    return open_study(folder, spec, space, list(fixed), metric, Direction.maximize)


@pytest.mark.parametrize(
    "content", [b"\0\xff", b"[1]\n", b'{"op_code": 99}\n', b"{}\n" * 3, b"SQLite format 3\0" + b"\1" * 5000]
)
def test_a_damaged_study_is_an_error_of_one_line(tmp_path: Path, content: bytes) -> None:
    study_file(tmp_path).write_bytes(content)
    with pytest.raises(ConfigError, match=r"study\.journal cannot be read as a study \(") as found:
        opened(tmp_path, OptunaSpec())
    assert "\n" not in str(found.value)


def test_a_study_continues_with_other_proposals(tmp_path: Path) -> None:
    spec = OptunaSpec(sampler=Sampler.random)
    first = opened(tmp_path, spec).ask()
    proposed = suggest(first, cast("Any", LR))
    again = opened(tmp_path, spec)
    (known,) = again.trials
    assert (known.state, [f"optimizer.lr={known.params['optimizer.lr']}"]) == (TrialState.RUNNING, proposed)
    # The values of an unfinished trial do not change, and the seed does not repeat the first proposal.
    assert suggest(optuna.trial.Trial(again, known._trial_id), cast("Any", LR)) == proposed
    assert suggest(again.ask(), cast("Any", LR)) != proposed


@pytest.mark.parametrize(
    ("fixed", "space", "says"),
    [
        (["seed=3"], LR, r"\(nothing -> seed=3\)"),
        ([], {"optimizer.lr": FloatDistribution(1e-4, 1)}, r"\(optimizer\.lr=\{.*\} -> optimizer\.lr=\{.*\}\)"),
    ],
)
def test_another_search_does_not_continue_the_study(tmp_path: Path, fixed: list[str], space: Any, says: str) -> None:
    opened(tmp_path, OptunaSpec())
    with pytest.raises(ConfigError, match=rf" has the study of another search {says}: repeat its command, or set "):
        opened(tmp_path, OptunaSpec(), *fixed, space=space)
    opened(tmp_path, OptunaSpec(sampler=Sampler.random))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (OptunaSpec(sampler_args={"seeds": 1}), r"sampler_args=\{'seeds': 1\} is refused by Optuna \(TPESampler.* 'seeds'\)"),
        (OptunaSpec(sampler=Sampler.random, sampler_args={"seed": -1}), r"sampler_args=.* \(Seed must be between 0 and "),
        (OptunaSpec(pruner=Pruner.threshold), r"pruner_args=\{\} is refused by Optuna \(Either lower or upper must be"),
        (OptunaSpec(pruner=Pruner.patient, pruner_args={"patience": -1}), r"pruner_args=.* is refused by Optuna \(patience "),
        (OptunaSpec(pruner=Pruner.asha, pruner_args={"reduction_factor": 1}), r"pruner_args=.* `reduction_factor >= 2`\)"),
    ],
)  # fmt: skip
def test_optuna_checks_the_arguments_of_the_sampler_and_the_pruner(spec: OptunaSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^hydra\.sweeper\.{says}") as found:
        check_arguments(spec)
    assert "\n" not in str(found.value)


# ------------------------------------------------------------------------------------------------------- pruning


class Recorded:
    """A search whose runs are files: their metrics are written by the test."""

    def __init__(self, folder: Path, spec: OptunaSpec, trials: int) -> None:
        self.folder = folder
        self.sweep = make_sweep(folder, *([f"seed={number}"] for number in range(trials)))
        self.start(spec)
        self.search.active = {trial.number: trial for trial in (self.study.ask() for _ in range(trials))}

    def start(self, spec: OptunaSpec) -> None:
        """Starts a search; a second call repeats it, with the trials that it has not finished."""
        self.study = opened(self.folder, spec)
        # No test of this class launches anything.
        self.search = _OptunaSearch(cast("ClipxLauncher", None), self.study, spec, cast("Any", LR), [], METRIC)
        self.search.active = {trial.number: Trial(self.study, trial._trial_id) for trial in self.study.trials}

    def log(self, number: int, *values: float) -> None:
        with (self.folder / str(number) / "metrics.jsonl").open("a") as file:
            for step, value in enumerate(values):
                row = {"step": step, "samples": step, "epoch": step, "seconds": 0, METRIC: value}
                file.write(json.dumps(row | {"train/loss": 1.0}) + "\n")

    def poll(self) -> list[int]:
        """Returns the points that are marked to be pruned."""
        self.search.polled = -math.inf
        self.search.watch(self.sweep.planned)
        return [int(path.parent.name) for path in sorted(self.folder.glob("*/prune"))]

    def end(self, number: int, state: str) -> None:
        planned = self.sweep.planned[number]
        planned.point.write_result(Result(state, error="a bug" if state == "failed" else None))
        self.search.record(planned)


@pytest.mark.parametrize(
    ("spec", "values", "pruned_at"),
    [
        (OptunaSpec(pruner=Pruner.median, pruner_args={"n_startup_trials": 3}), [0.1, 0.25, 0.3], 1),
        (
            OptunaSpec(pruner=Pruner.median, pruner_args={"n_startup_trials": 3, "n_warmup_steps": 3}),
            [0.1, 0.1, 0.1],
            3,
        ),
        (OptunaSpec(pruner=Pruner.patient, pruner_args={"n_startup_trials": 3, "patience": 1}), [0.1, 0.05, 0.05], 3),
        (OptunaSpec(pruner=Pruner.threshold, pruner_args={"lower": 0.15}), [0.2, 0.1, 0.1], 2),
        (OptunaSpec(pruner=Pruner.median, pruner_args={"n_startup_trials": 3}), [math.nan, 0.3, 0.3], 1),
    ],
    ids=lambda value: str(getattr(value, "pruner", value)),
)
def test_a_trial_is_pruned_at_the_evaluation_that_its_pruner_names(
    tmp_path: Path, spec: OptunaSpec, values: list[float], pruned_at: int
) -> None:
    recorded = Recorded(tmp_path, spec, 4)
    for number in range(3):
        recorded.log(number, *(0.1 * (number + 1) + 0.1 * step for step in range(3)))
        recorded.poll()
        (tmp_path / f"{number}/prune").unlink(missing_ok=True)
        recorded.end(number, "finished")
    marked = []
    for value in values:
        recorded.log(3, value)
        marked.append(3 in recorded.poll())
    assert marked == [step >= pruned_at for step in range(1, 4)]
    if math.isfinite(values[pruned_at - 1]):
        text = (tmp_path / "3/prune").read_text()
        assert text == f"{METRIC} = {values[pruned_at - 1]:.2%} at evaluation {pruned_at}, by pruner={spec.pruner}\n"


def test_a_repeated_search_judges_the_last_value_of_the_search_before_it(tmp_path: Path) -> None:
    """A search that is killed after it has reported a value may not have judged it, or had another pruner."""
    recorded = Recorded(tmp_path, OptunaSpec(), 2)
    recorded.log(0, 0.2, 0.3)
    recorded.log(1, 0.2, 0.1)
    assert recorded.poll() == []
    recorded.start(OptunaSpec(pruner=Pruner.threshold, pruner_args={"lower": 0.15}))
    assert recorded.poll() == [1]
    assert (tmp_path / "1/prune").read_text() == f"{METRIC} = 10.00% at evaluation 2, by pruner=threshold\n"
    assert [trial.intermediate_values for trial in recorded.study.trials] == [{1: 0.2, 2: 0.3}, {1: 0.2, 2: 0.1}]


def test_results_are_recorded_and_stopped_trials_stay_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded(tmp_path, OptunaSpec(pruner=Pruner.threshold, pruner_args={"lower": 0.15}), 5)
    for number in range(3):
        recorded.log(number, 0.1 * (number + 1))
    assert recorded.poll() == [0]
    recorded.log(0, 0.12)
    for number, state in enumerate(("pruned", "finished", "failed", "stopped", "finished")):
        recorded.end(number, state)
    found = [(trial.state.name, trial.value, trial.intermediate_values) for trial in recorded.study.trials]
    assert found == [
        ("PRUNED", 0.12, {1: 0.1, 2: 0.12}),
        ("COMPLETE", 0.2, {1: 0.2}),
        ("FAIL", None, {1: pytest.approx(0.3)}),
        ("RUNNING", None, {}),
        ("FAIL", None, {}),
    ]
    assert [states(tmp_path)[number][0] for number in "0123"] == ["pruned", "finished", "failed", "cancelled"]
    require_progress(recorded.search.failures, 3)
    said = r"^2 trials in a row have failed, .*=2 ends the search; trial 4: eval/zeroshot"
    with pytest.raises(ClipxError, match=said):
        require_progress(recorded.search.failures, 2)
