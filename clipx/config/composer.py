"""Composes many configurations that choose the same options of groups, as the points of a sweep do.

Hydra takes 0.2 s for a configuration, nearly all of it for the choices of groups. Configurations with the same choices
share a composition: values are set in a copy of it by Hydra's parser and rules, in 0.02 s.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from clipx.compat import apply_overrides, config_repository, overrides_dirname
from clipx.config.compose import checked, compose_config, isolated_hydra, misplaced_keys_as_errors, with_run_dir
from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.config.saved import flatten
from clipx.errors import ConfigError, require_effect

_SHARED = 256  # compositions that are cached: 1 MB each


class Composer:
    """Composes configurations, and each set of choices once. See `of`, and `PointComposer` for sweeps.

    `choose` composes the overrides that choose options, by Hydra. `is_group` returns whether a key is a group.
    """

    def __init__(self, choose: Callable[[Sequence[str]], DictConfig], is_group: Callable[[str], bool]) -> None:
        self._choose = choose
        self._is_group = functools.cache(is_group)
        self._composed = functools.lru_cache(_SHARED)(self._compose)

    @classmethod
    def of(cls, config_name: str, folders: Sequence[Path] = ()) -> Composer:
        """Returns a composer of what `compose_config` composes. The options must be registered: see `prepare`."""
        with isolated_hydra():
            loader = GlobalHydra.instance().config_loader()
        searchpath = [f"hydra.searchpath={[str(folder.absolute()) for folder in folders]}"]
        return cls(
            lambda choices: compose_config(config_name, choices, folders), _groups(loader, config_name, searchpath)
        )

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, list[Override]]:
        """Returns a configuration and its parsed overrides. Raises exceptions of COMPOSITION_ERRORS."""
        with misplaced_keys_as_errors(overrides):
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            chosen = tuple(str(override.input_line) for override in parsed if self._chooses(override))
            composed = self._composed(chosen)
            if isinstance(composed, Exception):
                raise composed
            cfg = copy.deepcopy(composed)
            apply_overrides([x for x in parsed if not self._chooses(x)], cfg)
        return cfg, parsed

    def _chooses(self, override: Override) -> bool:
        """Returns whether Hydra composes an override: the choice of an option, by Hydra's rules, or a key of Hydra."""
        if override.is_hydra_override() or override.is_sweep_override():
            return True
        return self._is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def _compose(self, choices: tuple[str, ...]) -> DictConfig | Exception:
        """Returns the composition, or the error, which many points may share."""
        try:
            return self._choose(choices)
        except COMPOSITION_ERRORS as error:
            return error


class PointComposer:
    """Composes and checks the points of the sweep `config`. `loader`: Hydra's, of the sweep."""

    def __init__(self, loader: ConfigLoader, config: DictConfig) -> None:
        typed = typing.cast("list[str]", OmegaConf.to_container(config.hydra.overrides.hydra))

        def choose(choices: Sequence[str]) -> DictConfig:
            composed = loader.load_sweep_config(config, list(choices))
            _check_controller(config.hydra, composed.hydra, choices)
            return composed

        self._composer = Composer(
            choose,
            _groups(loader, config.hydra.job.config_name, typed),
        )

    def compose(self, overrides: Sequence[str], index: int) -> tuple[Any, Path]:
        """Returns the checked spec of point `index` and its folder, the run directory of a run. Raises ConfigError."""
        outer = HydraConfig.instance().cfg
        try:
            cfg = self.configuration(overrides, index)
            HydraConfig.instance().set_config(cfg)
            hydra = HydraConfig.get()
            with open_dict(cfg):
                del cfg["hydra"]
            spec = checked(with_run_dir(cfg, hydra))
            return spec, Path(getattr(spec, "run_dir", hydra.runtime.output_dir))
        except COMPOSITION_ERRORS as error:
            raise ConfigError(one_line(error)) from error
        finally:
            HydraConfig.instance().cfg = outer

    def configuration(self, overrides: Sequence[str], index: int) -> DictConfig:
        """Returns the configuration of point `index` with Hydra's part, as `hydra.main` would. Sets HydraConfig."""
        cfg, parsed = self._composer.compose(overrides)
        task = [override for override in parsed if not override.is_hydra_override()]
        hydra = cfg.hydra
        with read_write(hydra), open_dict(hydra):
            hydra.overrides.task = [override.input_line for override in task]
            hydra.job.id, hydra.job.num = str(index), index
            hydra.job.override_dirname = overrides_dirname(task, **hydra.job.config.override_dirname)
            HydraConfig.instance().cfg = typing.cast("Any", cfg)  # for a folder that refers to the job
            hydra.runtime.output_dir = str(Path(hydra.sweep.dir, hydra.sweep.subdir).absolute())
        return cfg


def _check_controller(sweep: DictConfig, point: DictConfig, choices: Sequence[str]) -> None:
    """Raises ConfigError for what an option that is swept over sets of the sweep itself, which has begun without it."""

    def values(hydra: DictConfig) -> dict[str, Any]:
        chosen = {f"hydra/{group}": hydra.runtime.choices[f"hydra/{group}"] for group in ("launcher", "sweeper")}
        keys = {name: OmegaConf.to_container(hydra[name], resolve=False) for name in ("launcher", "sweeper", "sweep")}
        return chosen | dict(flatten(keys, "hydra"))

    before, reason = values(sweep), f"in an option that is swept over ({' '.join(choices)})"
    for key, value in values(point).items():
        same = key == "hydra.sweep.subdir" or value == before.get(key)
        require_effect(same, f"{key}={value}", reason, "give it on the command line")


def _groups(loader: ConfigLoader, config_name: str, overrides: list[str]) -> Callable[[str], bool]:
    """Returns a function of a key: whether it is a group, also in the folders that these overrides of Hydra add."""
    _, repository = config_repository(loader, config_name, overrides)
    found: Callable[[str], bool] = repository.group_exists
    return found
