"""The counts of tests/size.py on a small checkout, and its list of concepts on this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import ROOT
from size import Project, Row, concepts, measure, table

BATCH = """
class Batch:
    image: object
    index: int = 0
    kinds: ClassVar[int] = 1
"""
TRAINER = """
from clipx.data import batch
from clipx.data.batch import Batch

if TYPE_CHECKING:
    from clipx.spec import RunSpec

class Trainer:
    def __init__(self, spec: "RunSpec") -> None:
        self.spec, self.steps = spec, 0
        self.spec.changed = True

    def step(self, batch: Batch, other: "Trainer") -> None:
        import clipx.late
        self.steps += 1
"""
SPEC = """
class RunSpec:
    kind: str = "run"
    seed: int = 0
    rate: float = 1.0

Rate = float

def summary(trainer: "Trainer | None", *parts: int, last: int, **more: int) -> None: ...
"""
FILES = {
    "clipx/__init__.py": "",
    "clipx/spec.py": SPEC,
    "clipx/late.py": "x = 1\ny = 2",  # without a newline at the end: `wc -l` counts 1
    "clipx/data/batch.py": BATCH,
    "clipx/trainer/trainer.py": TRAINER,
    "clipx/trainer/page.js": "//\n//\n",
    "clipx/.hidden/file.py": "x\n",
    "clipx/extra/coca/model.py": "a = 1\n",
    "clipx/bench/loss.py": "class LossSpec:\n    steps: int = 1\n",
    "launch/clipx_launch/slurm.py": "a = 1\nb = 2\nc = 3\n",
    "tests/unit/test_a.py": "class TestA:\n    def test_one(self): ...\n\n\ndef test_two(): ...\n\n\ndef helper(): ...\n",
    "docs/guides/one.md": "# One two\n\nthree\n",
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "any name"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_counts_of_a_checkout(checkout: Path) -> None:
    sections = measure(checkout)
    counts = {row.name: row.value for rows in sections.values() for row in rows}
    spec, batch, trainer = (text.count("\n") for text in (SPEC, BATCH, TRAINER))
    assert (counts["clipx/*"], counts["clipx/data"], counts["clipx/trainer"]) == (spec + 1, batch, trainer)
    assert (counts["core"], counts["extra"], counts["bench"]) == (spec + 1 + batch + trainer, 1, 2)
    assert (counts["launch"], counts["clipx and launch"]) == (3, counts["core"] + 6)
    assert Row("clipx/trainer", trainer, "1 files, 2 lines of js, css, sh") in sections["lines of .py, as `wc -l`"]
    assert (counts["option keys"], counts["option keys without bench"], counts["words of docs"]) == (3, 2, 4)
    assert (counts["test files"], counts["test functions"]) == (1, 2)
    assert counts["fields of Batch"] == 2
    assert counts["attributes of Trainer"] == 2  # spec and steps
    assert counts["modules imported by Trainer"] == 3  # data.batch, by two forms; spec, for types; late
    assert counts["functions that take a Trainer"] == 1  # without Trainer's own
    assert sections["longest signatures, in parameters"][0] == Row("summary", 4, "clipx/spec.py")
    assert f"  {'core':34}{counts['core']:>7}  5 files" in table(sections)


def test_all_concepts_in_the_list_exist(checkout: Path) -> None:
    found = concepts(Project(checkout), ("Batch|Gone", "Trainer.step", "step", "Rate", "Batch.step", "Other|Another"))
    assert found == Row("concepts of a step", 4, "gone: Batch.step, gone: Other|Another")
    assert not concepts(Project(ROOT)).note
