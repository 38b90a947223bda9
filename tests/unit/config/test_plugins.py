"""Plug-ins of other authors: what they print, and whose error an exception is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runs import SMALL

from clipx import train
from clipx.config import plugins
from clipx.config.duration import Duration
from clipx.config.names import check_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path


def test_what_a_plugin_prints_goes_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "data/talks.py").write_text("print('a line')\n")
    plugins.load(folder, "data", "talks")
    assert capsys.readouterr() == ("", "a line\n")


def test_the_innermost_frame_of_clipx_or_of_a_plugin_decides_whose_error_it_is(folder: Path) -> None:
    (folder / "data/calls.py").write_text("def run(call):\n    return call()\n")
    module = plugins.load(folder, "data", "calls")

    def message(call: Callable[[], object]) -> str | None:
        try:
            module.run(call)
        except BaseException as error:
            found = plugins.error_of(error)
            return None if found is None else str(found)
        raise AssertionError

    ended = message(lambda: sys.exit(0))
    assert ended and ended.startswith("the plug-in data/calls ended the program by sys.exit(0) (")
    assert f"{folder}/data/calls.py:2)" in ended
    assert "raised IsADirectoryError" in (message((folder / "data").read_text) or "")
    assert message(lambda: check_name("name", None)) is None  # type: ignore[arg-type]  # a fault of clipx
    assert message(lambda: Duration.parse("x", "duration")) is None  # an error of the user
    assert message(lambda: signal.raise_signal(signal.SIGINT)) is None


BUILD = """
from dataclasses import dataclass

from clipx.config.registry import register
from clipx.objective.spec import ObjectiveSpec


@register("objective")
@dataclass(kw_only=True)
class Odd(ObjectiveSpec):
    kind: str = "odd_build"
    {}
"""
LACKING = "has no Odd.build, which is needed: define it"
EXITS = "def build(self, *_): raise SystemExit"


@pytest.mark.parametrize(("body", "says"), [("", LACKING), (EXITS, "ended the program by sys.exit(None) (")])
def test_a_plugin_that_cannot_be_built_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    (folder / "objective").mkdir()
    (folder / "objective/odd_build.yaml").write_text("defaults: [/schema/objective/odd_build@_here_]")
    (folder / "objective/odd_build.py").write_text(BUILD.format(body))
    words = [*SMALL, "objective=odd_build", f"run_dir={folder / 'run'}", "name=a"]
    monkeypatch.setattr("sys.argv", ["clipx-train", f"--config-dir={folder}", *words])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rror" in line]
    assert line.startswith(f"error: the plug-in objective/odd_build {says}")
