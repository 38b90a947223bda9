"""The list of concepts of tests/size.py names only what exists."""

from __future__ import annotations

from helpers import ROOT
from size import BEHIND, Project, concepts


def test_all_concepts_in_the_list_exist() -> None:
    project = Project(ROOT)
    assert not concepts(project).note
    assert not concepts(project, "behind", BEHIND).note
