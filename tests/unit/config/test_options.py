"""Every option of every group composes, validates and builds; invalid options raise a one-line error."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from helpers.cases import slow_except
from helpers.runs import NEEDED, compose
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase
from omegaconf import OmegaConf

import clipx.bench.__main__  # registers its options, as do the next two
import clipx.extra.check.command
import clipx.extra.wise_ft.command  # noqa: F401
from clipx.config.duration import Length
from clipx.config.registry import CONF_DIR, discover_installed, option_files
from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict, save, to_dict
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.optimizer.groups import parameter_groups
from clipx.trainer.saved_run import open_run
from clipx.trainer.spec import RunSpec
from clipx.trainer.spec import compose as real_compose

CPU, META = torch.device("cpu"), torch.device("meta")
LENGTH = Length(10_000, 100, 100_000)

GROUPS = sorted(f.name for f in dataclasses.fields(RunSpec) if f.name != "kind" and (CONF_DIR / f.name).is_dir())
OF_ANOTHER_COMMAND = {"bench"}
CONTENDERS = "experiment/fastclip_small"  # tests/integration/test_fastclip_study.py composes them
LISTS = {"evaluator", "logger"}
COMMANDS = (
    *("train", "evaluate", "export", "embed", "score", "select", "caption", "wise_ft", "check", "plan", "bench"),
    *("index", "vocabulary", "look", "prepare"),
)


def names(group: str) -> list[str]:
    return list(option_files(group))


OPTIONS = [(group, name) for group in GROUPS for name in names(group)]


# Groups of which any options fit together: the k-th options of all are composed at once.
TOGETHER = [{"model", "data", "distributed", "evaluator", "logger", "checkpoint"}]
TOGETHER += [set(GROUPS) - TOGETHER[0]]


@cache
def kth_options(groups: int, k: int) -> RunSpec:
    chosen = [(group, names(group)[k]) for group in sorted(TOGETHER[groups]) if k < len(names(group))]
    words = [f"{group}=[{name}]" if group in LISTS else f"{group}={name}" for group, name in chosen]
    return compose(*words, *(word for _, name in chosen for word in NEEDED.get(name, ())))


def composed(group: str, name: str) -> RunSpec:
    return kth_options(int(group not in TOGETHER[0]), names(group).index(name))


# ------------------------------------------------------------------------------------------ groups and their files


def test_every_file_is_an_option_composed_by_these_tests() -> None:
    groups = {group for group, _ in OPTIONS} | {"recipe", "experiment", "debug", "expectation", "model/text"}
    groups |= {"hydra/launcher", "hydra/sweeper", "hydra/hydra_logging", CONTENDERS, *OF_ANOTHER_COMMAND}
    covered = {f"{group}/{name}.yaml" for group in groups for name in names(group)}
    folders = (CONF_DIR, *discover_installed())
    files = {str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*") if path.is_file()}
    files -= {name for name in files if name.startswith("schema")}  # tests/unit/config/test_json_schema.py
    assert files - covered == {f"{name}.yaml" for name in COMMANDS} | {
        "hydra/default_launcher.yaml",
        "hydra/default_sweep.yaml",
    }


@pytest.mark.parametrize("name", slow_except(names("recipe"), "digits", "cc12m"))
def test_every_recipe_is_part_of_the_data_with_its_name(name: str) -> None:
    recipe = yaml.safe_load(option_files("recipe")[name].read_text())
    spec = to_dict(compose(f"data={name}"))
    assert OmegaConf.merge(spec, recipe) == spec
    real_images = name not in ("digits", "shapes")
    assert spec["precision"]["kind"] == ("amp_bf16" if real_images else "auto")


def test_every_launcher_and_sweeper_has_valid_keys() -> None:
    for kind in ("launcher", "sweeper"):
        for name in names(f"hydra/{kind}"):
            assert compose(f"hydra/{kind}={name}", "name=x") == compose("name=x"), name  # it belongs to Hydra


@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_composes(name: str) -> None:
    assert compose(f"experiment={name}", *NEEDED.get(name, ())).kind == "run"


@pytest.mark.parametrize("name", names("bench"))
def test_every_benchmark_composes_with_its_keys_at_the_top_level(name: str) -> None:
    assert compose(f"bench={name}", "device=cpu", config_name="bench").kind == name


@pytest.mark.parametrize("name", slow_except(names("model/text"), "clip_512", "modern_512", "hf"))
def test_every_text_tower_composes_and_builds(name: str) -> None:
    source = ["model.text.source=outputs/xlm_r"] if name == "hf" else []
    spec = compose("model=vit_b32", f"model/text={name}", *source)
    assert from_dict(RunSpec, to_dict(spec)) == spec
    if name != "hf":  # tests/unit/extra/test_hf_text.py
        assert spec.model.build(META, torch.float32).text.context_length == spec.model.text.context_length


# -------------------------------------------------------------------------------------------------- each option


KTH = [(groups, k) for groups, together in enumerate(TOGETHER) for k in range(max(len(names(g)) for g in together))]


@pytest.mark.parametrize(("groups", "k"), KTH)
def test_every_option_composes_into_a_typed_spec_and_back(groups: int, k: int) -> None:
    spec = kth_options(groups, k)
    for group in TOGETHER[groups]:
        if k < len(names(group)):
            part = getattr(spec, group)
            assert list(part) == [names(group)[k]] if group in LISTS else dataclasses.is_dataclass(part), group
    assert from_dict(RunSpec, json.loads(json.dumps(to_dict(spec)))) == spec
    node = OmegaConf.structured(spec)
    assert json.dumps(to_dict(spec)) == json.dumps(OmegaConf.to_container(node, enum_to_str=True))


BUILT = [name for name in names("model") if name != "weights"]  # a model of other weights: test_described.py


@pytest.mark.parametrize("name", slow_except(BUILT, "tiny", "rn50", "vit_b32", "vit_b16_siglip", "coca_tiny"))
def test_every_model_builds_on_the_meta_device_with_its_optimizer(name: str) -> None:
    spec = composed("model", name)
    assert spec.model.name == name
    model = spec.model.build(META, torch.float32)
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    objective = spec.objective.build(Comm(0, 1, 0, CPU), LENGTH)
    optimizer = spec.optimizer.build(parameter_groups(model, objective, spec.optimizer))
    grouped = sum(len(group["params"]) for group in optimizer.param_groups)
    assert grouped == sum(1 for module in (model, objective) for _ in module.parameters())


# -------------------------------------------------------------------------------------------- composition of a run


def test_a_model_sets_optimizer_defaults_that_the_command_line_overrides() -> None:
    assert to_dict(compose("model=rn50"))["optimizer"]["eps"] == 1e-8
    assert to_dict(compose("model=vit_b32"))["optimizer"]["eps"] == 1e-6
    assert to_dict(compose("model=rn50", "optimizer=adamw"))["optimizer"]["eps"] == 1e-6
    assert to_dict(compose("model=rn50", "optimizer.eps=1e-7"))["optimizer"]["eps"] == 1e-7


# --------------------------------------------------------------------------------- inside another Hydra application


def test_composing_inside_another_hydra_app_does_not_change_it(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        outer = GlobalHydra.instance().hydra
        assert real_compose("seed=5").seed == 5
        with pytest.raises(ConfigError):
            real_compose("seed=x")
        assert GlobalHydra.instance().hydra is outer
        assert str(getbase()) == "1.2"
        assert dict(hydra_compose("train")) == {"answer": 42}
    assert not GlobalHydra.instance().is_initialized()
    real_compose()
    assert not GlobalHydra.instance().is_initialized() and str(getbase()) == "1.2"


# ---------------------------------------------------------------------------------------------------- saved specs


def test_a_saved_spec_loads_as_an_equal_spec_of_plain_values(tmp_path: Path) -> None:
    spec = compose(
        *("data=csv", "data.path=t.csv", "data.separator='\\t'", "optimizer.decay_rule=published", "name='a: b #c'"),
        *("logger=[tensorboard,wandb]", "logger.wandb.tags=[a,b]", "+evaluator@evaluator.mine=zeroshot"),
        *("+model.image.options={drop_path_rate:0.1,flag:true}", "resume=outputs/earlier", "checkpoint=none"),
    )
    save(spec, tmp_path / "config.yaml", "make room")
    assert open_run(str(tmp_path)).spec == spec
    save(open_run(str(tmp_path)).spec, tmp_path / "again.yaml", "make room")
    text = (tmp_path / "config.yaml").read_text()
    assert (tmp_path / "again.yaml").read_text() == text
    assert "decay_rule: published" in text and "!" not in text and "${" not in text


# ------------------------------------------------------------------------------------------------------- renamed keys

SAVED_BY_8DDB223 = Path(__file__).with_name("run_saved_by_8ddb223.yaml")


def test_a_run_saved_by_8ddb223_loads() -> None:
    saved = read_saved(SAVED_BY_8DDB223)
    for source in saved["data"]["sources"].values():
        assert source.pop("workers") == 2  # the default of that time; a source of a mixture has no other than today's
    assert from_dict(RunSpec, saved) == compose(
        *(
            "name=earlier",
            "duration=30ep",
            "schedule.warmup=10000st",
            "precision=fp32",
            "compile.towers=true",
            "logger=[wandb]",
            "logger.wandb.tags=[a,b]",
        ),
        *("data=mixture", "+data@data.sources.a=csv", "data.sources.a.path=a.csv"),
        *("+data@data.sources.b=webdataset", "data.sources.b.shards=b.tar", "data.sources.b.weight=2"),
        *("model=vit_b16_siglip", "objective=siglip", "stages=[{until:5ep,image_size:112},{image_size:224}]"),
        *("evaluator=[retrieval,zeroshot]", "evaluator.retrieval.duplicate_captions=apart"),
        *("evaluator.zeroshot.held_out=false", "evaluator.zeroshot.classnames=imagenet"),
        *("+data@evaluator.zeroshot.sets.birds=folder", "evaluator.zeroshot.sets.birds.path=birds"),
        *("distributed=fsdp", "distributed.param_dtype=bfloat16", "distributed.reduce_dtype=float32"),
        "precision=amp_bf16",
        "checkpoint.max_failures=7",
        *("data.workers=2", "evaluator.zeroshot.sets.birds.workers=2"),
    )
