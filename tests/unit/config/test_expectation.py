"""Expected results: the shipped files fit their experiments, invalid files raise a one-line error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from helpers.runs import compose

from clipx.config.expectation import load_expectation
from clipx.config.registry import CONF_DIR
from clipx.errors import ConfigError
from clipx.evaluate import EvaluateSpec

SHIPPED = sorted(path.stem for path in (CONF_DIR / "expectation").glob("*.yaml"))
DOCS = (ROOT / "docs/guides/recipes.md").read_text()
VALID = {"overrides": ["data=digits"], "metrics": {"eval/zeroshot/top1": {"value": 0.5, "source": "a table"}}}


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_expectation_belongs_to_the_experiment_with_its_name(name: str) -> None:
    found = load_expectation(name, [CONF_DIR])
    assert found.overrides == [f"experiment={name}"]
    assert (CONF_DIR / "experiment" / f"{name}.yaml").is_file()
    spec = compose(*found.overrides)
    assert found.samples in (None, spec.data.published)
    assert all(0 < metric.value < 1 for metric in found.metrics.values()), "shares, not percentages"
    assert (found.ranks is None) == spec.model.name.startswith("vit"), "BatchNorm depends on the ranks"


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_metric_has_a_source_and_a_command_that_composes(name: str) -> None:
    for key, metric in load_expectation(name, [CONF_DIR]).metrics.items():
        assert re.search(r"arXiv:\d{4}\.\d{5} .*table|docs/openclip_results\.csv, row", metric.source)
        assert metric.command is not None and "=RUN" in metric.command
        names = metric.mean_of or [key]
        assert all(one == "datacomp/average_of_38" or one.startswith("eval/") for one in names)
        words = metric.command.partition("python -m clipx.evaluate ")[2].split()
        if words:
            spec = compose(*words, config_name="evaluate")
            assert isinstance(spec, EvaluateSpec) and spec.data is not None
            for one in names:
                assert one.startswith(tuple(f"eval/{kind}/{spec.data.name}/" for kind in spec.evaluator))


def test_the_recipes_of_datacomp_have_its_scales() -> None:
    for scale, samples in (("small", 12_800_000), ("medium", 128_000_000)):
        spec = compose(f"experiment=datacomp_{scale}_vit_b32")
        assert spec.data.published == samples
        assert float(spec.duration.removesuffix("sa")) == samples
        assert (spec.data.batch_size, spec.optimizer.lr, spec.optimizer.weight_decay) == (4096, 5e-4, 0.2)
        assert (spec.schedule.warmup, spec.optimizer.betas, spec.optimizer.eps) == ("500st", [0.9, 0.98], 1e-6)
        assert spec.data.replacement


def test_the_table_of_the_documentation_has_the_shipped_values() -> None:
    columns = (
        "eval/zeroshot/imagenet/top1",
        "flickr30k/mean_recall@1",
        "mscoco/mean_recall@1",
        "datacomp/average_of_38",
    )
    documented = {
        name: dict(zip(columns, map(str.strip, cells.split("|")), strict=True))
        for name, cells in re.findall(r"^\| `(\w+)` \|((?:[\d. ]*\|){3}[\d. ]*)\| [ao]", DOCS, re.MULTILINE)
    }
    assert sorted(documented) == SHIPPED
    for name, row in documented.items():
        metrics = load_expectation(name, [CONF_DIR]).metrics
        assert {key: f"{100 * one.value:.2f}" for key, one in metrics.items()} == {k: v for k, v in row.items() if v}


def test_the_example_of_the_documentation_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    found = load_expectation(str(tmp_path / "mine.yaml"), [])
    assert compose(*found.overrides).duration == "5ep"
    assert len(found.metrics) == 3


def written(folder: Path, values: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def metric(**values: object) -> dict[str, object]:
    return {**VALID, "metrics": {"eval/zeroshot/top1": {"value": 0.5, "source": "a table", **values}}}


def test_a_path_and_a_name_in_another_folder_are_read(tmp_path: Path) -> None:
    found = load_expectation(written(tmp_path, VALID), [CONF_DIR])
    assert found.metrics["eval/zeroshot/top1"].value == 0.5
    assert found.metrics["eval/zeroshot/top1"].tolerance is None
    (tmp_path / "expectation").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "expectation" / "mine.yaml")
    assert load_expectation("mine", [CONF_DIR, tmp_path]) == found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "is not an expectation, which is a mapping"),
        ({**VALID, "metrics": {}}, "metrics has no entry"),
        ({"metrics": VALID["metrics"]}, "overrides has no value: it is required"),
        ({"overrides": []}, "metrics has no value: it is required"),
        ({**VALID, "extra": 1}, "extra is not a key"),
        (metric(sources="x"), "metrics.eval/zeroshot/top1.sources is not a key"),
        (metric(value="much"), "'much'"),
        (metric(value=float("nan")), "value=nan is not a finite number"),
        (metric(tolerance=-0.1), "tolerance=-0.1 must be at least 0"),
        (metric(source=" "), "source= is empty"),
        ({**VALID, "metrics": {"eval/zeroshot/top1": {"value": 0.5}}}, "metrics.eval/zeroshot/top1.source has no value"),
        ({**VALID, "notes": ["${oc.env:HOME}"]}, "found an interpolation"),
    ],
)  # fmt: skip
def test_an_invalid_file_raises_a_one_line_error_with_its_path(tmp_path: Path, values: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_expectation(written(tmp_path, values), [CONF_DIR])
    assert message in str(error.value) and "mine.yaml" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean cc3m_rn50_fastclip_v3") as error:
        load_expectation("cc3m_rn50_fastclip3", [CONF_DIR])
    assert all(name in str(error.value) for name in SHIPPED)
    with pytest.raises(ConfigError, match=r"expected=absent\.yaml does not exist"):
        load_expectation("absent.yaml", [CONF_DIR])
