"""The docstrings of the public classes have the sections of a reference, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import io
import re
import socket
from pathlib import Path
from typing import NoReturn

import pytest
from helpers import ROOT

from clipx import Trainer
from clipx.checkpoint.format import Checkpoint
from clipx.data import DataSpec, Source
from clipx.data.batch import Batch
from clipx.distributed import Comm
from clipx.evaluator import EvaluatorSpec
from clipx.evaluator.base import Embedder
from clipx.model.clip import CLIP
from clipx.objective import ObjectiveSpec
from clipx.objective.base import Objective, StepInputs
from clipx.trainer.learner import Learner

# Public classes, and whether tensors go in or out, so that the docstring says their shapes.
CLASSES: dict[type, bool] = {
    Trainer: True,
    Learner: True,
    Objective: True,
    StepInputs: True,
    Source: False,
    Batch: True,
    Comm: True,
    ObjectiveSpec: False,
    DataSpec: False,
    EvaluatorSpec: False,
    Embedder: True,
    CLIP: True,
    Checkpoint: True,
}
EACH = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def sections(doc: str) -> dict[str, str]:
    """Returns the text of each section of a docstring by its title, in order. "": what is before the first one."""
    found = re.split(r"^(Args|Attributes|Shape|Raises|Example):\n(?= {4}\S)", inspect.cleandoc(doc), flags=re.MULTILINE)
    texts = [inspect.cleandoc(f"\n{text}") for text in found[2::2]]
    return {"": found[0], **dict(zip(found[1::2], texts, strict=True))}


def entries(section: str) -> list[str]:
    """Returns the names in a section of lines `NAME: meaning.`, without their continuation lines."""
    return re.findall(r"^(\w+): \S", section, flags=re.MULTILINE)


def parameters(call: object) -> set[str]:
    """Returns the names of the public parameters of a class or function, without self, *args and **kwargs."""
    found = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in found if p.kind not in variable and p.name != "self" and not p.name.startswith("_")}


def example(doc: str) -> doctest.DocTest:
    """Returns the example of a docstring, to be run as in a new interpreter: it has to import what it uses."""
    shown = sections(doc).get("Example", "")
    return doctest.DocTestParser().get_doctest(shown, {"__name__": "__main__"}, "example", None, 0)


def shows_something(test: doctest.DocTest) -> bool:
    """Returns whether an example has an output or an assertion, which can be wrong."""
    return any(one.want or one.source.startswith("assert ") for one in test.examples)


def failures(test: doctest.DocTest) -> str:
    """Runs an example. Returns what differs from it, as doctest reports it; empty if nothing does."""
    report = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    return report.getvalue()


@EACH
def test_a_public_class_has_all_sections(cls: type) -> None:
    found = sections(cls.__doc__ or "")
    assert found.pop("").strip()
    found.pop("Attributes", None)
    assert list(found) == (["Args", "Shape", "Raises", "Example"] if CLASSES[cls] else ["Args", "Raises", "Example"])
    assert entries(found["Raises"])


@EACH
def test_the_arguments_of_a_public_class_are_those_that_it_takes(cls: type) -> None:
    named, own = entries(sections(cls.__doc__ or "")["Args"]), parameters(cls)
    methods = [method for name, method in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]
    assert named and len({*named}) == len(named)
    assert {*named} <= own.union(*map(parameters, methods))
    if not cls.__name__.endswith("Spec"):  # each key of a spec has its own docstring, which --help prints
        assert own <= {*named}


@EACH
def test_the_example_of_a_public_class_runs(cls: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("an example uses the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    shown = example(cls.__doc__ or "")
    assert shows_something(shown)
    assert not failures(shown)


def test_the_page_of_the_python_api_shows_the_public_classes() -> None:
    lines = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8").splitlines()
    assert not [cls for cls in CLASSES if f"::: {cls.__module__}.{cls.__qualname__}" not in lines]


# ------------------------------------------------------------------------------------------------- the checks


DOC = """
A counter.

Args:
    start: first number,
        of any size.
    step: difference of two numbers.

Raises:
    ValueError: the step is 0.

Example:
    Three numbers:

        >>> import itertools
        >>> list(itertools.islice(itertools.count(1, step=2), 3))
        [1, 3, 5]
"""


def test_the_checks_accept_a_complete_docstring() -> None:
    found = sections(DOC)
    assert list(found) == ["", "Args", "Raises", "Example"]
    assert entries(found["Args"]) == ["start", "step"]
    assert shows_something(example(DOC))
    assert not failures(example(DOC))


def test_the_checks_find_what_a_docstring_lacks() -> None:
    assert "Example" not in sections(DOC.partition("Example:")[0])
    assert "Raises" not in sections(DOC.replace("    ValueError: the step is 0.\n", ""))
    assert not shows_something(example(DOC.partition("Example:")[0]))
    assert not shows_something(example(DOC.replace("[1, 3, 5]", "")))
    assert "Expected:\n    [1, 3, 4]" in failures(example(DOC.replace("3, 5]", "3, 4]")))
    assert "NameError" in failures(example(DOC.replace("import itertools", "pass")))
