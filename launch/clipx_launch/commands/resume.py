"""Launches again the points that ended without finishing, with the settings of their last launch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from clipx.config.registry import discover_installed, load_folder
from clipx.config.renamed import REMOVED
from clipx.config.saved import option_from_dict, removed_values
from clipx.errors import ClipxError, without_effect
from clipx_launch.commands.cancel import count_states
from clipx_launch.commands.run import RESUMABLE, RunFiles
from clipx_launch.commands.runs import sweep_runs
from clipx_launch.files import SEARCH, Launch, SearchFile, launch_dir, read_file
from clipx_launch.slurm_spec import SlurmSpec
from clipx_launch.sweep import Sweep


def resume(sweep: Path) -> None:
    """Launches again the points that ended without finishing, from their checkpoints. Raises ClipxError.

    They run the current code, with the settings and in the working directory of their last launch. A search with
    Optuna continues instead with its unfinished trials and the remaining ones.
    """
    runs = sweep_runs(sweep)
    folder = next((run.sweep for run in runs if run.sweep is not None), sweep.absolute())
    if (command := read_file(launch_dir(folder) / SEARCH, SearchFile)) is not None:
        # imported late: Optuna, which only a search needs
        from clipx_launch.search.search import resume_search

        resume_search(command)
    again = [run for run in runs if run.state in RESUMABLE and (run.point or run.sweep is None)]
    if not again:
        print(f"nothing to resume: {count_states(runs)}")
        return
    for launch, points in _by_launch(again):
        _start(folder, launch, points)


def _by_launch(runs: Sequence[RunFiles]) -> list[tuple[Launch, list[RunFiles]]]:
    """Groups the points that were launched with the same settings, by any process, for one launch."""
    found: dict[str, tuple[Launch, list[RunFiles]]] = {}
    for run in runs:
        if run.point is None:
            raise ClipxError(
                f"{run.folder} was started without a launcher: python -m clipx.train resume={run.folder} continues it"
            )
        if run.launch is None:
            raise ClipxError(f"sweep.json has no launch settings of point {run.name}: run its command again")
        _check_removed(run.launch.settings)
        settings = json.dumps(asdict(replace(run.launch, process=None)), sort_keys=True)
        found.setdefault(settings, (run.launch, []))[1].append(run)
    return list(found.values())


def _check_removed(settings: dict[str, Any]) -> None:
    """Raises ConfigError for a setting of a launch by an earlier version that this one would ignore."""
    for key, value in removed_values(settings, "launcher.").items():
        reason = next(gone.reason for name, gone in REMOVED.items() if f"{key}.".startswith(f"{name}."))
        given, fix = f"hydra.{key}={value} of the sweep's launch", "repeat the sweep's command with what replaces it"
        raise without_effect(given, f"in this version ({reason})", fix)


def _start(folder: Path, launch: Launch, runs: Sequence[RunFiles]) -> None:
    for path in (launch.cwd, *launch.plugins):
        if not Path(path).is_dir():
            raise ClipxError(f"{path}, which the sweep was launched with, does not exist: restore it")
    discover_installed()
    for path in reversed(launch.plugins):
        load_folder(Path(path))
    with contextlib.chdir(launch.cwd):
        sweep = Sweep.from_points(folder, [run.point for run in runs if run.point is not None])
        spec = option_from_dict("launcher", launch.settings)
        for returned in (replace(spec, wait=False) if isinstance(spec, SlurmSpec) else spec).launch(sweep):
            _ = returned.return_value  # raises the error of a failed point
