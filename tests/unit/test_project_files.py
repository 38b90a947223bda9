"""Files about the project: bounds of its dependencies, the lock file, metadata for citations."""

from __future__ import annotations

import shlex
import tomllib
from importlib.metadata import version

import pytest
import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from clipx import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
LOCKED_EXTRAS = ("examples", "mlflow", "optuna", "quantized", "syntax", "trackio")  # those of a run
PINS = [Requirement(line.removesuffix(" \\")) for line in LOCK.splitlines() if line and line[0] not in "# "]
# Packages without an upper bound: clipx uses their documented API alone, and promises nothing that depends on a release.
UNBOUNDED = {
    "torchvision",  # torch's bound holds it: a release fits one torch
    "omegaconf",  # hydra-core's bound holds it
    "clipx",
    *("pillow", "simplejpeg", "pyarrow", "safetensors", "braceexpand"),  # files and formats
    *("fsspec", "s3fs", "filelock"),
    *("tokenizers", "ftfy", "regex"),  # a test compares the ids with open_clip's
    *("matplotlib", "rich", "tensorboard", "wandb", "sqlalchemy", "alembic"),
    *("scikit-learn", "pandas", "cmaes"),
    *("nbclient", "ipykernel", "jsonschema", "build", "hatchling"),
}


def test_a_dependency_has_an_upper_bound_or_a_reason_for_none() -> None:
    given = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    bounded = {
        canonicalize_name(requirement.name): any(part.operator in ("<", "==", "~=") for part in requirement.specifier)
        for requirement in map(Requirement, given)
    }
    assert {name for name, has_bound in bounded.items() if not has_bound} == UNBOUNDED
    installed = Requirement(next(text for text in given if text.startswith("open_clip_torch"))).specifier
    assert installed.contains(version("open_clip_torch")) and not installed.contains("4.0.0")


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_file_pins_a_version_of_each_dependency(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pinned = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in PINS
        if not pin.marker or pin.marker.evaluate(environment)
    }
    optional = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(text for extra in LOCKED_EXTRAS for text in optional[extra])]
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_the_lock_file_has_hashes_and_no_addresses() -> None:
    assert LOCK.count("    --hash=sha256:") >= len(PINS) > 80
    assert "://" not in LOCK and "--index-url" not in LOCK
    command = shlex.split(LOCK.splitlines()[1].lstrip("# "))
    assert [command[i + 1] for i, word in enumerate(command) if word == "--extra"] == list(LOCKED_EXTRAS)


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"], citation["license"]) == ("clipx", __version__, PROJECT["license"])
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
