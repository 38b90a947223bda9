"""conf/schema.json: up to date, accepts every YAML file of the configuration, and reports what clipx would refuse."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf
from referencing import Registry, Resource

from clipx.config.reference import SCHEMA
from clipx.config.registry import CONF_DIR, discover_installed

SITES = CONF_DIR.parent / "launch" / "sites"
ROOTS = (SITES, CONF_DIR, *discover_installed())


def schema_of(path: Path) -> str:
    """Returns the path of the schema of a YAML file in conf/ or in launch/sites/, relative to conf/."""
    folder = str(path.parent.relative_to(next(root for root in ROOTS if path.is_relative_to(root))))
    if folder.startswith(("experiment", "recipe", "debug")) or path.name == "train.yaml":
        return "schema.json"
    name = path.stem if folder == "." else path.parent.name
    return f"schema/{name}.json"


# The keys of bench.yaml are the group's, those of hydra_logging are Python's logging, and default_launcher has none.
FILES = sorted(
    path
    for root in ROOTS[1:]
    for path in root.rglob("*.yaml")
    if path.name != "bench.yaml" and path.parent.name not in ("hydra_logging", "hydra")
)
FILES += sorted(path for path in SITES.rglob("hydra/**/*.yaml"))


@cache
def registry() -> Registry[Any]:
    """Returns the schemas by their URIs, relative to which they refer to each other."""
    files = [*CONF_DIR.glob("schema.json"), *CONF_DIR.glob("schema/*.json")]
    return (
        Registry()
        .with_resources((path.as_uri(), Resource.from_contents(json.loads(path.read_text()))) for path in files)
        .crawl()
    )


@cache
def validator(name: str) -> Draft7Validator:
    return Draft7Validator({"$ref": (CONF_DIR / name).as_uri()}, registry=registry())


def errors(text: str, name: str = "schema.json") -> list[str]:
    """Returns the errors of the text of a YAML file, each with its key."""
    values = OmegaConf.to_container(OmegaConf.create(text))
    found = list(validator(name).iter_errors(values))
    return [f"{error.json_path}: {(error.context or [error])[0].message}" for error in found]  # type: ignore[list-item]


def test_the_schema_is_what_the_specs_give(tmp_path: Path) -> None:
    # in a new process: other tests register options
    subprocess.run([sys.executable, "-m", "clipx.config.reference", str(tmp_path / "schema.json")], check=True)
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.json")}
    stored = {str(path.relative_to(CONF_DIR)): path.read_text() for path in CONF_DIR.rglob("*.json")}
    changed = sorted(name for name in written.keys() | stored.keys() if written.get(name) != stored.get(name))
    texts = ([files.get(name, "").splitlines() for files in (stored, written)] for name in changed)
    lines = [line for before, after in texts for line in difflib.unified_diff(before, after, n=0)]
    assert not changed, "\n".join(
        [f"run python -m clipx.config.reference, which changes {', '.join(changed)}:", *lines]
    )


def test_every_file_is_accepted() -> None:
    Draft7Validator.check_schema(json.loads(SCHEMA.read_text()))
    found = {str(path): errors(path.read_text(), schema_of(path)) for path in FILES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


RUN = [
    ("evaluator: {zeroshot: {evry: 1ep}}", "$.evaluator.zeroshot: Additional properties are not allowed ('evry' was"),
    ("stages: [{image_sise: 8}]", "$.stages[0]: Additional properties are not allowed ('image_sise' was unexpected)"),
    ("seed: 1.5", "$.seed: 1.5 is not of type 'integer', 'string'"),
    ("optimizer: {betas: [a, 0.9]}", "$.optimizer.betas[0]: 'a' does not match"),
    ("optimizer: {non_finite: stopp}", "$.optimizer.non_finite: 'stopp' is not one of ['stop', 'skip', 'rollback']"),
    (
        "defaults: [override /objective: siglip]\nobjective: {rho: 8}",
        "$.objective: Additional properties are not allowed ('rho' was unexpected)",
    ),
]


@pytest.mark.parametrize(("text", "message"), RUN, ids=[text for text, _ in RUN])
def test_an_invalid_key_or_value_is_reported_with_its_key(text: str, message: str) -> None:
    assert [error[: len(message)] for error in errors(text)] == [message]
