"""Expected results: the shipped files fit their experiments, invalid files raise a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.runs import compose

from clipx.config.registry import option_files
from clipx.errors import ConfigError
from clipx.extra.check.expectation import load_expectation

SHIPPED = list(option_files("expectation"))
VALID = {"overrides": ["data=digits"], "metrics": {"eval/zeroshot/top1": {"value": 0.5, "source": "a table"}}}


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_expectation_belongs_to_the_experiment_with_its_name(name: str) -> None:
    found = load_expectation(name, [])
    assert found.overrides == [f"experiment={name}"]
    assert name in option_files("experiment")
    spec = compose(*found.overrides)
    assert found.samples in (None, spec.data.published)
    assert all(0 < metric.value < 1 for metric in found.metrics.values()), "shares, not percentages"
    assert (found.ranks is None) == spec.model.name.startswith("vit"), "BatchNorm depends on the ranks"


def written(folder: Path, values: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def metric(**values: object) -> dict[str, object]:
    return {**VALID, "metrics": {"eval/zeroshot/top1": {"value": 0.5, "source": "a table", **values}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**VALID, "extra": 1}, "extra is not a key"),
        (metric(value=float("nan")), "value=nan is not a finite number"),
        (metric(tolerance=-0.1), "tolerance=-0.1 must be at least 0"),
        ({**VALID, "notes": ["${oc.env:HOME}"]}, "found an interpolation"),
    ],
)  # fmt: skip
def test_an_invalid_file_raises_a_one_line_error_with_its_path(tmp_path: Path, values: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_expectation(written(tmp_path, values), [])
    assert message in str(error.value) and "mine.yaml" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
