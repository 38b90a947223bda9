"""Composition on a saved configuration instead of the defaults in conf/."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from clipx.config.messages import LIST_GROUPS
from clipx.config.registry import CONF_DIR, NESTED_OPTIONS

_SAVED = "saved"  # name of the primary configuration, of its option in each group, and of the group of its other keys


def based_on(saved: DictConfig, config_name: str) -> str:
    """Registers the primary configuration of a command with saved values as its defaults. Returns its name.

    In each group the default choice is the option that was saved. Overrides, choices of options and experiments then
    mean what they mean on the defaults in conf/, by Hydra's own rules. `saved`: as `saved_config` returns it.
    """
    own: dict[str, Any] = {}
    defaults: list[Any] = [config_name]
    for key in map(str, saved):
        node = saved._get_node(key)
        if not (CONF_DIR / key).is_dir():
            own[key] = node
        elif key in LIST_GROUPS:
            _store(key, {key: node}, package="_global_")
            defaults.append({f"override /{key}": [_SAVED]})
        else:
            _store_option(key, saved[key], NESTED_OPTIONS.get(key, {}))
            defaults.append({f"override /{key}": _SAVED})
    del own["kind"]
    _store(_SAVED, own, package="_global_")
    defaults += [{f"override /{_SAVED}": _SAVED}, {"override /recipe": None}]
    _store(None, {"defaults": defaults})
    return _SAVED


def _store_option(group: str, option: DictConfig, nested: Any = ()) -> None:
    """Registers an option of a group in the form of the files in conf/, which choose its schema and nested options."""
    for name in nested:
        _store_option(f"{group}/{name}", option[name])
    schema = f"/schema/{group.rpartition('/')[2]}/{option.kind}@_here_"
    defaults = [schema, *({name: _SAVED} for name in nested)]
    values = {key: option._get_node(key) for key in map(str, option) if key not in ("kind", *nested)}
    _store(group, {"defaults": [*defaults, "_self_"], **values})


def _store(group: str | None, values: dict[str, Any], package: str | None = None) -> None:
    ConfigStore.instance().store(_SAVED, OmegaConf.create(values), group=group, package=package)
