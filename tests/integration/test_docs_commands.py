"""Every command that the documentation or `--help` shows exists and composes. `test_docs_runs.py` runs those that this machine can run."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import ROOT, runs
from helpers.cases import slow_except
from helpers.documentation import Command, blocks, clipx_words, commands, help_block, pages
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from clipx.bench.step import gathered
from clipx.cli import _changes_of_run, _help, cli
from clipx.commands import commands as modules_of_commands
from clipx.commands import implementation
from clipx.config.grammar import hydra_override
from clipx.config.typed import check_typed
from clipx.errors import ClipxError
from clipx_launch.__main__ import parser as sweep_parser
from clipx_launch.print_script import hydra_arguments

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Programs of others. Their arguments are not checked, except those of pip and pytest.
PROGRAMS = {
    "apptainer", "apt-get", "bash", "cat", "cd", "clip_benchmark", "cp", "curl", "df", "docker", "echo", "eval", "export", "git",
    "grep", "head", "img2dataset", "kill", "kubectl", "lint-imports", "ls", "mkdir", "mlflow", "mkdocs", "mypy", "open_clip_train.main", "nvidia-smi", "pre-commit", "printf", "rm", "ruff",
    "sbatch", "sky", "source", "squeue", "tail", "tar", "tensorboard", "trackio", "uv", "venv", "wandb", "wc", "xdg-open",
}  # fmt: skip
# Values for `key=…` and `key=NAME`, where readers type theirs, and files of theirs whose existence is checked early.
STAND_INS = {"data": "digits", "model": "tiny", "experiment": "cc3m_rn50_openclip"}
FILES = ("results/eval_results.jsonl",)
# Groups whose keys a command changes in the configuration of a run.
OF_RUN = {"evaluate": ("precision", "data", "evaluator"), "embed": ("data",)}
SITES = ROOT / "launch/sites"
SHELL = [
    (block, command)
    for block in [
        *(block for page in pages() for block in blocks(page)),
        *map(help_block, modules_of_commands().values()),
    ]
    if block.language == "bash"
    for command in commands(block)
]


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    installed = "python3 -m venv .venv && .venv/bin/pip install -q -e "
    assert f"{installed}. && .venv/bin/python -m clipx.train\n" in readme
    assert f"{installed}'.[test]' && .venv/bin/python -m pytest -q -n 3\n" in readme
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", readme):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", slow_except(sorted({block.page for block, _ in SHELL}), "README.md"))
def test_every_command_of_a_page_exists_and_composes(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    failed = []
    for _, command in SHELL:
        if command.page == page:
            try:
                check(command)
            except (AssertionError, ClipxError, SystemExit) as error:
                failed.append(f"{command}\n    {error}")
    assert not failed, "\n".join(failed)


def check(command: Command) -> None:
    """Raises an exception for a command that does not exist, or whose arguments are not valid."""
    words = clipx_words(command)
    if words is not None:
        check_clipx(words[0], words[1:])
        return
    program, *rest = (Path(command.words[0]).name, *command.words[1:])
    if program.startswith("python") and rest[:1] == ["-m"]:
        program, *rest = rest[1:]
    if program == "pip":
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys()
    elif program.startswith("python") and rest[:1] == ["-c"]:
        compile(rest[1], str(command), "exec")
    elif program.startswith("python"):
        name = next(word for word in rest if word.endswith(".py"))
        assert (ROOT / name).is_file() or f"`{name}`" in (ROOT / command.page).read_text(), f"{name}: no such file"
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))
    else:
        assert program in PROGRAMS, f"{program} is not in PROGRAMS"


def check_clipx(module: str, words: Sequence[str]) -> None:
    """Composes a command of clipx, or parses it as `clipx-sweep` does."""
    packages = ("clipx", "clipx_launch", "clipx.bench")
    importlib.import_module(f"{module}.__main__" if module in packages else implementation(module))  # registers options
    if module == "clipx_launch":
        if words[0] == "script":
            check_clipx("clipx.train", hydra_arguments(list(words[1:])))
        else:
            sweep_parser().parse_args(words)
        return
    name = module.removeprefix("clipx").removeprefix(".")
    if not name or "-sc" in words or "--version" in words:
        return
    if name == "bench":
        if not words:
            return  # lists the benchmarks
        words = [*(gathered(words[1:]) if words[0] == "step" else words[1:]), f"bench={words[0]}"]
    parser = get_args_parser()
    typed = list(map(hydra_override, words))
    check_typed(typed, parser)
    arguments = parser.parse_intermixed_args(typed)
    folders = [ROOT / arguments.config_dir.replace("~/clipx-site", str(SITES))] if arguments.config_dir else []
    if folders and not folders[0].is_dir():
        return  # the page creates the folder: `test_docs_runs.py`, or the test of the page, runs it
    config_name = name.rpartition(".")[2]
    if arguments.help:
        assert _help(cli(print, config_name, prints=True), arguments.overrides, folders)
        return
    words = given(arguments.overrides)
    words += runs.NEEDED["weights"] if "model=weights" in words else ()  # their configuration is read
    changes = _changes_of_run(words, OF_RUN.get(config_name, ()))
    runs.compose(*changes)
    words = [word for word in words if word not in changes]
    point = [first_value(word) for word in words] if arguments.multirun else words
    runs.compose(*point, config_name=config_name, config_dir=folders[0] if folders else None)


def given(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides with a value for each `…`. The word `…` stands for further overrides."""
    found = []
    for word in overrides:
        key, _, value = word.partition("=")
        if value.strip("'") == "…" or (value == "NAME" and key in STAND_INS):
            found.append(f"{key}={STAND_INS.get(key, 'PLACE')}")
        elif word != "…":
            found.append(word.replace("…", "x"))
    return found


def first_value(word: str) -> str:
    """Returns the override with the first value of a sweep."""
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        return word
    value = override.value().start if override.is_interval_sweep() else next(iter(override.sweep_string_iterator()))
    return f"{override.get_key_element()}={value}"
