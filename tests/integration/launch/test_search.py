"""Searches with Optuna by real runs: a better learning rate is found, a worse one is pruned, a killed search continues.

The learning rate 0.01 lowers the loss; 1e-12 does not. A run with the latter is held after five steps of its process
until the file `prune` ends it, so that it is pruned however slow the search is. A killed run continues at step 6, and
is held a second time before step 11: STEPS is larger.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import optuna
import pytest
from helpers.processes import is_running
from helpers.runs import SMALL, VIT, run, start
from helpers.slurm_jobs import LOCAL, held, launch, logs, rows
from helpers.sweeps import states
from helpers.waiting import wait_until

from clipx_launch.__main__ import main
from clipx_launch.search.study import study_file

GOOD, BAD = "0.01", "1e-12"
STEPS = 12
SPACE = f"optimizer.lr={GOOD},{BAD}"
PRUNED = ("hydra.sweeper.pruner=median", "hydra.sweeper.pruner_args={n_startup_trials:1,n_warmup_steps:5}")


def command(sweep: Path) -> tuple[str, ...]:
    """Returns the words of a search. The run of the bad rate is held until it is pruned."""
    gates = sweep.with_name(f"{sweep.name}-gates")
    gates.mkdir()
    (gates / GOOD).touch()
    (gates / BAD).symlink_to(sweep / "1/prune")
    run_options = (*SMALL, *VIT, f"duration={STEPS}st", "checkpoint.every=1st", *held(sweep)[:3])
    options = ("hydra.sweeper.metric=train/loss", "hydra.sweeper.sampler=grid", f"hydra.sweep.dir={sweep}")
    until = f"objective.until='{gates}/${{optimizer.lr}}'"
    return ("hydra/sweeper=clipx_optuna", *options, *run_options, until, SPACE)


def trials(sweep: Path) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(study_file(sweep))))
    return optuna.load_study(study_name="clipx", storage=storage).trials


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_search_continues_and_prunes_the_worse_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "s"
    words = (*LOCAL, *command(sweep))
    first = start(tmp_path / "out", "-m", "clipx.train", *words)
    saved = sweep / "1/checkpoints/step-00000005"  # without it the resumed run would log step 5 again
    wait_until(lambda: saved.is_dir() or first.poll() is not None, lambda: first.out.read_text())
    assert first.returncode is None, first.err.read_text()
    worker = json.loads((sweep / "1/run.lock").read_text())["pid"]
    first.kill()
    first.wait(600)
    wait_until(lambda: not is_running(worker), "the run outlives its search")
    assert [trial.state.name for trial in trials(sweep)] == ["COMPLETE", "RUNNING"]
    finished = (sweep / "0/metrics.jsonl").stat().st_mtime_ns

    done = launch(*words, *PRUNED)
    assert "best    trial 0  train/loss" in done.stdout, done.stdout + logs(sweep / "1")
    assert f"trials  1 finished, 1 pruned; {sweep}/study.journal" in done.stdout
    assert (sweep / "0/metrics.jsonl").stat().st_mtime_ns == finished, "a finished trial was repeated"
    assert [row["step"] for row in rows(sweep / "1")] == list(range(1, 1 + len(rows(sweep / "1"))))
    good, bad = trials(sweep)
    assert (good.state.name, bad.state.name) == ("COMPLETE", "PRUNED")
    assert good.value is not None and good.value == rows(sweep / "0")[-1]["train/loss"] < min(
        bad.intermediate_values.values()
    )
    assert bad.value == rows(sweep / "1")[-1]["train/loss"]
    assert 5 <= len(rows(sweep / "1")) < STEPS, "the bad trial was not pruned early"
    state, reason = states(sweep)["1"]
    assert (state, reason.partition(" = ")[0], reason.rpartition(" at ")[2]) == (
        "pruned",
        "train/loss",
        "evaluation 5, by pruner=median",
    )
    assert states(sweep)["0"] == ("finished", "")
    assert main(["results", str(sweep)]) == 0
    assert "pruned" in capsys.readouterr().out

    again = run(sys.executable, "-m", "clipx_launch", "resume", str(sweep), fresh=True)
    assert "best    trial 0  train/loss" in again.stdout
    other = launch(*words, "seed=3", check=False)
    assert (other.returncode, other.stderr.partition(":")[0]) == (2, "error")
    assert "has the study of another search (nothing -> seed=3)" in other.stderr
