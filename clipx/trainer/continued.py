"""Composition of a run that continues: on its saved configuration, which the command line changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from omegaconf import OmegaConf

from clipx.checkpoint.resume import Resume
from clipx.config.base import based_on, describe_model
from clipx.config.registry import option_files, spec_class
from clipx.config.saved import saved_config
from clipx.errors import CheckpointError, ConfigError, require, require_effect


def composition_base(config_name: str, words: Sequence[str], folders: Sequence[Path] = ()) -> str:
    """Returns the primary configuration for the overrides `words` of a command that trains or plans a run.

    If resume= names a run or one of its checkpoints, it is the run's saved configuration with the keys of
    `config_name`, which the words then change; else `config_name`. Reads the configuration of the weights for
    model=weights. `folders`: of --config-dir. Raises ClipxError.
    """
    typed = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        typed[override.get_key_element().lstrip("+~")] = override
    if "weights" in _texts(typed.get("model")):
        _describe_model(typed.get("model.weights"))
    points = [Resume.parse(text) for text in _texts(typed.get("resume"))]
    named = [(point, point.place) for point in points if point.place is not None]
    if not named:
        return config_name
    resume, place = named[0]
    text = resume.text
    for word in typed.values():
        require(
            not word.is_sweep_override(),
            f"resume={text} continues one run, and {word.input_line} is a sweep: give one value, or start new runs "
            "from its weights by model.weights=…",
        )
    values = _resumed_values(place, text, *_texts(typed.get("checkpoint.remote")))
    if resume.url is None:
        for run_dir in _texts(typed.get("run_dir")):
            same = Path(run_dir).absolute() == Path(place).absolute()
            require_effect(same, f"run_dir={run_dir}", f"with resume={text}, which continues in its directory")
        values["run_dir"] = place
    files = [path for group in ("experiment", "debug") for path in _option_files(group, typed.get(group), folders)]
    try:
        return based_on(saved_config(spec_class("", "run"), values), config_name, files)
    except ConfigError as error:
        raise CheckpointError(f"{place} cannot be resumed ({error}): restore its config.yaml") from error


def _describe_model(typed: Override | None) -> None:
    """Registers the model of the weights at the typed model.weights, for model=weights. Raises ClipxError."""
    locations = _texts(typed)
    if typed is None or not locations:
        describe_model(None)
        return
    from clipx.trainer.saved_run import described_model

    require(
        len(locations) == 1,
        f"{typed.input_line} names several models, and model=weights takes the sizes of one: give one value, or choose "
        "the model of all",
    )
    describe_model(OmegaConf.structured(described_model(locations[0])))


def _texts(override: Override | None) -> list[str]:
    """Returns the typed value of a string, or the values of a sweep, with interpolations resolved. Empty: none."""
    if override is None or override.is_delete():
        return []
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    texts = [value.text if isinstance(value, QuotedString) else value for value in values]
    return [str(OmegaConf.create({"value": text}).value) for text in texts if text is not None]


def _option_files(group: str, typed: Override | None, folders: Sequence[Path]) -> list[Path]:
    """Returns the file of the option of a group that was typed, if there is one."""
    known = option_files(group, folders)
    return [known[name] for name in _texts(typed) if name in known]


def _resumed_values(place: str, text: str, remote: str | None = None) -> dict[str, Any]:
    """Returns the saved values of a run that is resumed, from its copy at `checkpoint.remote` if it is only there."""
    from clipx.checkpoint.manager import run_url  # imported here: a new run is composed without
    from clipx.run.directory import RunDir
    from clipx.trainer.saved_run import CONFIG, saved_values
    from clipx.weights.download import errors_of, fetched_run

    if "://" not in place and remote and not RunDir(Path(place)).holds_run:
        place = run_url(remote, Path(place))
    with errors_of("resume"):
        folder = fetched_run(place, (CONFIG,)) if "://" in place else Path(place)
    return saved_values(folder, f"resume={text}")
