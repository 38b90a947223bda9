"""`clipx-sweep script [sbatch | torchrun] [KEY=VALUE …] -- [OVERRIDE …]`: prints the script of a run, to start by hand.

sbatch     script for `sbatch` on a cluster; the default. Keys of clipx_slurm: nodes=2 tasks_per_node=8 partition=gpu
torchrun   script for each of several hosts without SLURM. Keys of clipx_torchrun: nodes=2 tasks_per_node=8 host=node1

    clipx-sweep script nodes=2 tasks_per_node=8 partition=gpu -- model=vit_b32 data=cc12m name=large > job.sh
    clipx-sweep script torchrun tasks_per_node=8 -- model=vit_b32 data=cc12m name=large > run.sh

KEY is an option of hydra.launcher; OVERRIDE is an override of `python -m clipx.train`. launcher=NAME selects a site's
launcher file: give its --config-dir among the overrides. The run is checked as by the launchers before the script is
printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from clipx.cli import print_error, with_output
from clipx.config.grammar import hydra_override
from clipx.errors import ConfigError, require

_LAUNCHERS = {"sbatch": "clipx_slurm", "torchrun": "clipx_torchrun"}
_PRINTER = "hydra_plugins.clipx_plugins.SlurmScriptPrinter"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script. Returns the exit code: 0, or 2 if the run is not valid."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        with with_output():
            print(__doc__)
        return 0
    try:
        command = hydra_arguments(words)
    except ConfigError as error:
        print_error(error, full=False)
        return error.exit_code
    from clipx.train import main as train

    before, sys.argv = sys.argv, ["clipx.train", *command]
    try:
        train()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    finally:
        sys.argv = before
    return 0


def hydra_arguments(words: Sequence[str]) -> list[str]:
    """Returns the arguments of `clipx.train` with which a launcher prints the script. Raises ConfigError."""
    separator = words.index("--") if "--" in words else len(words)
    launcher_words, overrides = list(words[:separator]), words[separator + 1 :]
    kind = launcher_words.pop(0) if launcher_words and "=" not in launcher_words[0] else "sbatch"
    require(kind in _LAUNCHERS, f"{kind} is not a script: write sbatch or torchrun, then KEY=VALUE, --, overrides")
    launcher, keys = _LAUNCHERS[kind], []
    for word in launcher_words:
        key, equals, value = word.partition("=")
        require(bool(equals), f"{word} is not KEY=VALUE: put overrides of `clipx.train` after --")
        if key == "launcher":
            launcher = value
        else:
            keys.append(f"+hydra.launcher.{word[1:]}" if word.startswith("+") else f"hydra.launcher.{word}")
    printing = [f"hydra.launcher._target_={_PRINTER}"] if kind == "sbatch" else []
    return ["-m", *overrides, *_folder(overrides), f"hydra/launcher={launcher}", *keys, *printing]


def _folder(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that put the files of a sweep of one point, a run, into its run directory."""
    typed = [hydra_override(word) for word in overrides if "=" in word and not word.startswith("-")]
    with suppress(HydraException):  # reported when the run is composed
        parsed = OverridesParser.create().parse_overrides(typed)
        if not any(one.is_sweep_override() or one.key_or_group.startswith("hydra.sweep") for one in parsed):
            return ["hydra.sweep.dir=${run_dir}", "hydra.sweep.subdir=."]
    return []
