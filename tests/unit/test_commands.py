"""The commands: `clipx COMMAND`, their scripts and their help. Every command that is named anywhere exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.documentation import commands as shell_commands
from helpers.documentation import help_block
from helpers.runs import run

import clipx.evaluate
import clipx.extra.plan.command  # noqa: F401  # registers its options, as the one before
from clipx.__main__ import main
from clipx.commands import commands as modules_of_commands
from clipx.commands import implementation, name_of
from clipx.config.catalogue import commands, read_yaml
from clipx.config.compose import compose_config
from clipx.config.help import overview
from clipx.config.registry import CONF_DIR

ROOT = CONF_DIR.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
COMMANDS = tuple(modules_of_commands().values())
PLACES = ("clipx/**/*.py", "launch/**/*", "conf/**/*.yaml", "docs/**/*.md", "*.md")
# Names of threads.
OTHERS = {f"clipx-{name}" for name in "cache read uploader".split()}


def test_commands_that_are_named_exist() -> None:
    modules, scripts = set(), set()
    for path in (
        path for place in PLACES for path in ROOT.glob(place) if path.is_file() and "__pycache__" not in path.parts
    ):
        text = path.read_text(encoding="utf-8")
        modules |= set(re.findall(r"-m (clipx[\w.]*\w)", text))
        scripts |= set(re.findall(r"(?<![\w/.-])(clipx-[a-z][a-z-]*[a-z])(?![\w/.])", text))
    assert len(modules) > 10 and {"clipx-train", "clipx-sweep"} <= scripts
    for module in modules:
        found = find_spec(module)
        assert found is not None and (not found.submodule_search_locations or find_spec(f"{module}.__main__")), module
    assert scripts - OTHERS <= SCRIPTS.keys()


def test_every_module_that_composes_a_command_is_a_command_with_a_script() -> None:
    assert {*COMMANDS} == {*(command.module for command in commands()), "clipx_launch"}
    bodies = {module: implementation(module) for module in COMMANDS}
    main_of = {module: body if is_module(body) else f"{body}.__main__" for module, body in bodies.items()}
    assert {
        "clipx": "clipx.__main__:main",
        **{f"clipx-{name_of(module)}": f"{main}:main" for module, main in main_of.items()},
    } == SCRIPTS


def is_module(module: str) -> bool:
    found = find_spec(module)
    return found is not None and found.submodule_search_locations is None


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_commands_are_listed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["clipx", *words])
    main()
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in listed if line[:2] == "  "] == [[name_of(one), one] for one in COMMANDS]


def test_a_command_runs_as_its_module_does(tmp_path: Path) -> None:
    words = ("seed=0", f"run_dir={tmp_path}/run", "duration=0st")
    by_name, by_module = (
        run(sys.executable, "-m", *command, *words, check=False) for command in (("clipx", "train"), ("clipx.train",))
    )
    assert by_name.returncode == by_module.returncode == 2
    assert by_name.stderr == by_module.stderr != ""
    assert run(sys.executable, "-m", "clipx", "sweep", "status", str(tmp_path), check=False).returncode == 2
    assert run(sys.executable, "-m", "clipx", "wise_ft", "--version").stdout.startswith("clipx ")


def completed(line: str) -> list[str]:
    """Returns what bash offers for the last word of a line after the code of completion has been evaluated."""
    words = line.split(" ")
    script = f"""eval "$(clipx -sc install=bash)"
    COMP_WORDS=({" ".join(map(shlex.quote, words))}) COMP_CWORD={len(words) - 1} COMP_LINE={shlex.quote(line)}
    _clipx 2> /dev/null; printf '%s\\n' "${{COMPREPLY[@]}}" """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_tab_key_completes_commands_and_what_a_command_takes() -> None:
    assert completed("clipx ") == [name_of(module) for module in COMMANDS]
    assert completed("clipx wi") == ["wise-ft"]
    assert completed("clipx train objective=fast") == [f"objective=fastclip_v{i}" for i in range(4)]
    assert completed("clipx look sam") == ["samples="]
    assert completed("clipx sweep sta") == []


def test_the_help_of_each_command_has_examples_and_the_docs_of_its_keys() -> None:
    for command in commands():
        template = read_yaml(command.file)["hydra"]["help"]["template"]
        assert "Keys" in template and template.rstrip().endswith("$KEYS"), command
    without = [module for module in COMMANDS if not shell_commands(help_block(module))]
    assert not without


def test_help_shows_the_keys_of_a_command_but_not_those_of_its_groups_and_of_a_run() -> None:
    shown = {name: overview(compose_config(name, [], [], with_hydra=True), []) for name in ("evaluate", "plan")}
    assert re.findall(r"^(\w+)(?:=.*)?  \(", shown["evaluate"], re.MULTILINE) == ["run", "step", "weights", "out"]
    assert re.findall(r"^(\w+)(?:=.*)?  \(", shown["plan"], re.MULTILINE)[:3] == ["json", "ranks", "samples"]
    assert "\nprecision: amp_bf16, " in shown["evaluate"]
