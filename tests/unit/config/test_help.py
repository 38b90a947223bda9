"""`--help KEY`: every option has a docstring, and the command prints it."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from clipx.config.catalogue import load_all
from clipx.config.docstrings import field_docs, type_name
from clipx.config.registry import CONF_DIR
from clipx.data.spec import DataSpec
from clipx.train import main

load_all()


def specs_in(hint: typing.Any) -> Iterator[type]:
    """Yields the dataclasses in a type, and those in their fields."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        yield hint
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            yield from specs_in(hints[field.name])
    for argument in typing.get_args(hint):
        yield from specs_in(argument)


def specs() -> list[type]:
    """Returns every dataclass whose fields are keys of a configuration."""
    repo = ConfigStore.instance().repo["schema"]
    groups = [repo, *(group for group in repo.values() if isinstance(group, dict))]
    nodes = [node for group in groups for node in group.values() if not isinstance(node, dict)]
    found = {spec for node in nodes for spec in specs_in(OmegaConf.get_type(node.node))}
    return sorted(found, key=lambda spec: (spec.__module__, spec.__qualname__))


SPECS = specs()


@pytest.fixture
def clipx_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `clipx-train --help WORDS…` on a terminal of 120 columns. Returns its output."""

    def run(*words: str) -> str:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["clipx-train", "--help", *words])
        main()
        return capsys.readouterr().out

    return run


def test_every_option_and_every_field_has_a_docstring() -> None:
    docs = {f"{spec.__name__}.{name}": doc for spec in SPECS for name, doc in field_docs(spec).items()}
    fields = [f"{spec.__name__}.{f.name}" for spec in SPECS for f in dataclasses.fields(spec) if f.name != "kind"]
    assert not [name for name in fields if name not in docs], "without an attribute docstring"
    assert not [name for name in fields if not docs[name].endswith(".")], "docstring does not end with a period"
    assert not [spec for spec in SPECS if (spec.__doc__ or "").startswith(f"{spec.__name__}(")], "without a docstring"


def test_the_specs_of_every_group_and_command_are_checked() -> None:
    registered = {name.removesuffix(".yaml") for name in ConfigStore.instance().repo["schema"]}
    assert {path.stem for path in CONF_DIR.iterdir()} <= registered | {
        "train",
        "hydra",
        "experiment",
        "debug",
        "expectation",
        "recipe",
        "schema",
    }
    assert {"RunSpec", "WebDatasetSpec", "StageSpec", "ProfilerSpec", "SlurmSpec", "IndexSpec"} <= {
        spec.__name__ for spec in SPECS
    }


@dataclasses.dataclass
class Base:
    inherited: int = 1
    """Of the base."""
    replaced: int = 2
    """Of the base."""


@dataclasses.dataclass
class Derived(Base):
    replaced: int = 3
    """Of the derived class,
    on two lines."""
    bare: int = 4
    added: list[int] | None = None
    "In single quotes."


def test_docstrings_are_inherited_and_overridden() -> None:
    assert field_docs(Derived) == {
        "inherited": "Of the base.",
        "replaced": "Of the derived class, on two lines.",
        "added": "In single quotes.",
    }


def test_a_key_is_printed_with_its_value_type_and_docstring(clipx_help: Callable[..., str]) -> None:
    printed = clipx_help("data.shuffle_window")
    head, *body = printed.splitlines()
    assert head == "data.shuffle_window=200000  (int)"
    assert " ".join(" ".join(body).split()) == field_docs(DataSpec)["shuffle_window"]


def test_overrides_select_the_options_and_set_the_values(clipx_help: Callable[..., str]) -> None:
    printed = clipx_help("data=webdataset", "data.batch_size=512", "data.shards", "data.batch_size")
    assert printed.startswith("data.shards=null  (str | null)\n")
    assert "\n\ndata.batch_size=512  (int)\n" in printed


def test_a_group_is_printed_with_its_options_and_all_its_keys(clipx_help: Callable[..., str]) -> None:
    printed = clipx_help("objective=fastclip_v3", "objective")
    assert printed.startswith("Options of objective: classification, coca, dcl,")
    assert "objective=fastclip_v3\n    " in printed
    for name in ("tau", "gamma.schedule", "rho"):
        assert f"\nobjective.{name}" in printed


def test_a_key_of_an_option_that_is_not_selected_names_the_option(clipx_help: Callable[..., str]) -> None:
    printed = clipx_help("data.shards")
    assert "data.shards=null  (str | null, data=webdataset)" in printed


def test_an_unknown_key_is_an_error_that_names_similar_keys(
    clipx_help: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        clipx_help("checkpoint.evry")
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: --help checkpoint.evry names no key of this configuration: similar keys are checkpoint.every, "
        "checkpoint.keep_every, checkpoint.best\n"
    )


def test_options_of_a_config_dir_are_printed(clipx_help: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "objective"
    folder.mkdir()
    (folder / "steep.yaml").write_text("defaults: [/schema/objective/steep@_here_]\n")
    (folder / "steep.py").write_text(
        "from dataclasses import dataclass\n"
        "from clipx.config.registry import option\n"
        "from clipx.objective.infonce import InfoNCESpec\n"
        "@option('objective')\n"
        "@dataclass(kw_only=True, slots=True)\n"
        "class SteepSpec(InfoNCESpec):\n"
        "    '''InfoNCE with a slope.'''\n"
        "    kind: str = 'steep'\n"
        "    slope: float = 2.0\n"
        "    '''Factor of the loss, above 0.'''\n"
    )
    printed = clipx_help("--config-dir", str(tmp_path), "objective=steep", "objective")
    assert "siglip, sogclr, steep objective=steep" in " ".join(printed.split())
    assert "objective=steep\n    InfoNCE with a slope.\n" in printed
    assert "objective.slope=2.0  (float)\n    Factor of the loss, above 0." in printed


def test_every_type_has_a_name() -> None:
    assert type_name(int | None) == "int | null"
    assert type_name(list[float]) == "list[float]"
    assert type_name(dict[str, DataSpec]) == "dict[str, DataSpec]"
