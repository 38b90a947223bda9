"""Composition on a saved configuration instead of the defaults in conf/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from clipx.config.registry import CONF_DIR, DESCRIBED, LIST_GROUPS, NESTED_OPTIONS, SAVED


def based_on(saved: DictConfig, config_name: str, files: Sequence[Path] = ()) -> str:
    """Registers the primary configuration of a command with saved values as its defaults. Returns its name.

    In each group the default choice is the option that was saved. Overrides, choices of options and experiments then
    mean what they mean on the defaults in conf/, by Hydra's own rules. Only overrides of name and run_dir change these.

    Args:
        saved: as `saved_config` returns it.
        config_name: primary configuration of the command in conf/.
        files: YAML files of the chosen experiments, whose choices of options replace the saved ones.
    """
    own: dict[str, Any] = {}
    defaults: list[Any] = [config_name]
    chosen = {group for path in files for group in _chosen_in(path, set())}
    for key, node in _items(saved):
        if key in chosen:
            continue
        if not (CONF_DIR / key).is_dir():
            own[key] = node
        elif key in LIST_GROUPS:
            _store(key, {key: node}, package="_global_")
            defaults.append({f"override /{key}": [SAVED]})
        else:
            _store_option(key, saved[key], NESTED_OPTIONS.get(key, {}))
            defaults.append({f"override /{key}": SAVED})
    del own["kind"]
    defaults += [{f"override /{SAVED}": SAVED}, "_self_"]
    _store(None, {"defaults": defaults, **{key: own.pop(key) for key in ("name", "run_dir")}})
    _store(SAVED, own, package="_global_")
    return SAVED


def describe_model(model: DictConfig | None) -> None:
    """Registers the model that the option `weights` of the group model composes. None: there is no description."""
    values, kind, text, text_kind = {}, "clip", {}, "clip"
    if model is not None:
        values = {key: node for key, node in _items(model) if key not in ("kind", "text", "weights")}
        text = {key: node for key, node in _items(model.text) if key != "kind"}
        kind, text_kind = model.kind, model.text.kind
    schemas = f"/schema/model/{kind}@_here_", f"/schema/text/{text_kind}@_here_"
    _store(f"model/{DESCRIBED}", {"defaults": [schemas[0], "_self_"], **values} if model else {}, name="sizes")
    _store("model/text", {"defaults": [schemas[1], "_self_"], **text}, name=DESCRIBED)


def _items(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yields keys and values as they are written: interpolations are not resolved."""
    return ((str(key), value) for key, value in cfg.items_ex(resolve=False))


def _chosen_in(path: Path, read: set[Path]) -> Iterator[str]:
    """Yields the groups of which a file chooses an option, or one that it extends. `read`: files read before."""
    if path in read or not path.is_file():
        return
    read.add(path)
    config = OmegaConf.load(path)
    for entry in config.get("defaults", []) if isinstance(config, DictConfig) else []:
        if isinstance(entry, str):
            yield from _chosen_in(path.with_name(f"{entry}.yaml"), read)
        else:
            yield from (str(key).removeprefix("override /").partition("@")[0] for key in entry)


def _store_option(group: str, option: DictConfig, nested: Any = ()) -> None:
    """Registers an option of a group in the form of the files in conf/, which choose its schema and nested options."""
    for name in nested:
        _store_option(f"{group}/{name}", option[name])
    schema = f"/schema/{group.rpartition('/')[2]}/{option.kind}@_here_"
    defaults = [schema, *({name: SAVED} for name in nested)]
    values = {key: node for key, node in _items(option) if key not in ("kind", *nested)}
    _store(group, {"defaults": [*defaults, "_self_"], **values})


def _store(group: str | None, values: dict[str, Any], package: str | None = None, name: str = SAVED) -> None:
    ConfigStore.instance().store(name, OmegaConf.create(values), group=group, package=package)


describe_model(None)
