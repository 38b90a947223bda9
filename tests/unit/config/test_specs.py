"""`@frozen`: a spec does not change after its construction."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pickle

import pytest
from helpers.specs import specs
from omegaconf import OmegaConf

import clipx
from clipx.config.registry import PACKAGE, frozen
from clipx.config.saved import to_dict
from clipx.objective.spec import ObjectiveSpec


@frozen
class Own:
    number: int = 1
    items: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class OfPlugin(ObjectiveSpec):
    """An option of a plug-in, with a dictionary instead of slots."""

    kind: str = "of_plugin"
    margin: float = 0.2
    names: list[str] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("spec", [Own(), OfPlugin(margin=0.5)], ids=["frozen", "plain"])
def test_an_attribute_is_set_once(spec: object) -> None:
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        before = getattr(spec, field.name)
        with pytest.raises(dataclasses.FrozenInstanceError, match=rf"{field.name} is set: use dataclasses\.replace"):
            setattr(spec, field.name, before)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(spec, field.name)
        assert getattr(spec, field.name) is before
    with pytest.raises(AttributeError):
        Own().other = 1  # type: ignore[attr-defined]


def test_no_field_of_a_registered_spec_can_be_assigned() -> None:
    for cls in specs():
        spec = cls.__new__(cls)
        for field in dataclasses.fields(cls):
            setattr(spec, field.name, None)  # as __init__ does
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(spec, field.name, None)


def test_a_run_is_copied_and_pickled() -> None:
    spec = clipx.compose(
        "name=a", "duration=20ep", "stages=[{until:10ep,lr_scale:0.5},{lr_scale:0.1}]", "evaluator=[zeroshot]"
    )
    for copied in (copy.deepcopy(spec), copy.copy(spec), pickle.loads(pickle.dumps(spec)), dataclasses.replace(spec)):
        assert copied == spec and copied is not spec and to_dict(copied) == to_dict(spec)
        with pytest.raises(dataclasses.FrozenInstanceError):
            copied.seed = 1
    assert dataclasses.replace(spec, seed=7).seed == 7 and spec.seed == 0
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Own), {"number": 2})) == Own(number=2)


def test_a_spec_is_completed_by_its_own_construction_alone() -> None:
    """`complete` is called by `__post_init__`, or by a check that it calls."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "complete(self, " in (text := path.read_text(encoding="utf-8")):
            functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            found += [f"{path.stem}.{f.name}" for f in functions for n in ast.walk(f) if _calls_complete(n)]
    assert len(found) == 7
    assert {name.partition(".")[2] for name in found} == {"__post_init__", "_check_samples"}


def _calls_complete(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node).startswith("complete(self, ")


def test_the_text_of_a_key_is_parsed_by_its_spec_alone() -> None:
    """A spec offers the parsed value, so that the text of a duration, a cadence or `resume` is parsed at one place."""
    places = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "launch").rglob("*.py")]):
        parsers = [f"{name}.parse" for name in ("Duration", "Cadence", "Resume")]
        text = path.read_text(encoding="utf-8")
        if path.stem != "duration" and any(f"{parser}(" in text for parser in parsers):
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            parsed = [ast.unparse(c.args[0]) for c in calls if ast.unparse(c.func) in parsers]
            places.append(f"{path.relative_to(PACKAGE.parent)}: {', '.join(sorted(parsed))}")
    assert places == [
        "clipx/checkpoint/spec.py: self.every, self.keep_every",
        "clipx/evaluator/spec.py: self.every",
        "clipx/extra/successors/neuclip.py: self.restart",
        "clipx/model/spec.py: text",  # patch_dropout_final
        "clipx/objective/fastclip.py: self.decay",
        "clipx/schedule.py: self.cooldown, text",  # warmup
        "clipx/trainer/continued.py: text",  # the words of the command line, before the spec is composed
        "clipx/trainer/spec.py: self.log_every, self.resume, text",  # duration, which `clipx-sweep` reads, too
        "clipx/trainer/stages.py: self.until",
    ]
