"""Turns the errors of Hydra, OmegaConf and YAML into one line with the value, the rule and the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipx.config.registry import CONF_DIR

if TYPE_CHECKING:
    pass

import difflib

# Files that say nothing to a user.
_COMMANDS = (
    *("train", "evaluate", "caption", "wise_ft", "embed"),
    *("export", "plan", "bench", "index", "prepare", "hydra/config"),
)


NOT_COMPOSED = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def one_line(error: BaseException) -> str:
    """Hydra's, OmegaConf's and YAML's errors as one line with value, rule and fix."""
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    if isinstance(error, yaml.YAMLError):
        return f"YAML cannot be read: {text}: correct the file"
    found = re.match(r"In '([^']+)'", text)
    inner = not found or found[1] in _COMMANDS or found[1].startswith("schema/")
    place = "" if found is None or inner else f" (in {found[1]}.yaml)"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group:
            return no_such_option(group, name, error.options or _options(group)) + place
    cause = _root(error)
    key = str(getattr(cause, "full_key", "") or "")
    if cause is not None and re.match(r"Key '[^']*' (is )?not in ", str(cause)):
        parent = cause.parent_node
        siblings = [str(name) for name in parent if name != "hydra"] if isinstance(parent, DictConfig) else []
        return no_such_key(key, siblings, free=OmegaConf.get_type(parent) is dict) + place
    return reworded(text if cause is None else str(cause).splitlines()[0], key, text) + place


def unreadable(override: str) -> str:
    return f"{override} cannot be read: write key=value, a list as key=[a,b], and other signs as key='…'"


def _root(error: BaseException) -> OmegaConfBaseException | None:
    """OmegaConf's own error, which knows the key, under Hydra's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OmegaConfBaseException):
        found = found.__cause__ or found.__context__
    return found


def _options(group: str) -> list[str]:
    """The options of a group that is named in a YAML file."""
    stored: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        stored = stored.get(part, {})
    return [name.removesuffix(".yaml") for name in stored] or [p.stem for p in CONF_DIR.glob(f"{group}/*.yaml")]


LISTS = ("evaluator", "logger")  # the groups of which a run takes any number of options


_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


_TYPES |= {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


# How OmegaConf's and Hydra's sentences begin -> value, rule, fix. Named groups fill the words.
_WORDS = (
    (
        r"Value '(?P<value>.*)' of type '\w+' could not be converted to (?P<type>\w+)"
        r"|Invalid type assigned: (?!NoneType)\w+ is not a subclass of (?P<type2>int|float|bool|str)\.",
        "{key}={value} has the wrong type: give {type}",
    ),
    (r"Value '(?P<value>.*)' is not a valid (?P<type>\w+)", "{key}={value} has the wrong type: give {type}"),
    (r"Cannot convert '\w+' to string: '(?P<value>.*)'", "{key}={value} has the wrong type: give text"),
    (r"Invalid value assigned: \w+ is not a ListConfig", "{key}={value} has the wrong type: give a list, {key}=[…,…]"),
    (r"Cannot assign \w+ to Dict", "{key}={value} has the wrong type: add the values one by one, +{key}.KEY=…"),
    (
        r"Invalid type assigned: .*(Evaluator|Logger)Spec\.|field '(evaluator|logger)\.\w+' is not Optional",
        "{key}={value} is not possible: choose options by {group}=[…] and set their values by {group}.OPTION.KEY=…",
    ),
    (
        r"Invalid type assigned: (str|int|float) is not a subclass of DataSpec\.",
        "{key}={value} is not possible: add an option of the group data by +data@{key}=OPTION",
    ),
    (r"Invalid type assigned: NoneType|field '.*' is not Optional", "{key}=null is not allowed: give a value"),
    (r"Invalid type assigned: ", "{key}={value} is not possible: it has values of its own, set them by {key}.KEY=…"),
    (
        r"Invalid value '(?P<value>.*)', expected one of \[(?P<known>.*)\]",
        "{key}={value} is not a choice: choose one of {known}",
    ),
    (r"Interpolation key '(?P<name>.*)' not found", "{key} refers to {name}, which is not a key: correct the name"),
    (
        r".*Environment variable '(?P<name>.*)' not found",
        "{key} refers to the environment variable {name}, which is not set: export it, or give {key}=…",
    ),
    (
        r"Ambiguous value for argument '(?P<key>[^=]*)=(?P<value>.*?)' 1\.",
        "{key}={value} is several values: for a sweep add -m, for a list write {key}=[{value}]",
    ),
    (
        r"Could not append to config\..* prefix: '(?P<key>[^=]*)=(?P<value>.*?)' Or ",
        "+{key}={value} adds a key that is there already: write {key}={value}",
    ),
    (
        r"Multiple values for .*'override (?P<key>\S+): (?P<value>.*)'",
        "+{key}={value} adds a second {key} where there can be one: write {key}={value}",
    ),
    (
        r"force-add of .*: '\+\+(?P<key>[^=]*)=(?P<value>.*)'",
        "++{key}={value} is for keys, not for groups: write {key}={value}",
    ),
    (r"Could not delete (from config\. )?'(?P<name>[^']*)'", "~{name} takes out what is not there: leave it away"),
)


def reworded(said: str, key: str, text: str) -> str:
    """OmegaConf's or Hydra's sentence as value, rule and fix. `text` is Hydra's, which may quote the whole override."""
    typed = re.match(r"Error merging override \+*([^=]+)=(.*)", text)
    words = {"key": typed[1] if typed and key in typed[1] else key, "value": typed[2] if typed else "…"}
    for pattern, line in _WORDS:
        if found := re.match(pattern, said):
            words |= {name: value for name, value in found.groupdict().items() if value is not None}
            kind = words.get("type") or words.get("type2") or ""
            return line.format(**words | {"group": words["key"].split(".")[0], "type": _TYPES.get(kind, kind)})
    return re.sub(r" Config search path:.*| See https?://.*", "", f"{key}: {said}" if key else said)


def no_such_option(group: str, name: str, options: Sequence[str]) -> str:
    if not options:
        return f"{group}={name} is not an option: the group {group} has none, check its name or give --config-dir"
    number = "any of" if group in LISTS else "one of"
    fix = f"; for none write {group}=[]" if group in LISTS else ""
    return f"{group}={name} is not an option: choose {number} {', '.join(sorted(options))}{near(name, options)}{fix}"


def no_such_key(key: str, siblings: Sequence[str], free: bool = False) -> str:
    """`free`: whether a key can be added where there is none."""
    group, _, name = key.rpartition(".")
    known = [sibling for sibling in siblings if sibling != "kind"]
    rule = f"the keys are {', '.join(known)}{near(name, known)}" if known else "there are none yet"
    fix = f"; choose options by {group}=[…]" if group in LISTS else f"; add it by +{chosen(key)}=…" if free else ""
    return f"{key} is not a key here: {rule}{fix}"


def chosen(key: str) -> str:
    """What stands before the = where the option at a key is chosen: for a source of a mixture, or a set of an
    evaluator, its group as well."""
    held = re.fullmatch(r"(data|evaluator\.[^.]+\.sets\.[^.]+)(\.sources\.[^.]+)*", key)
    return f"data@{key}" if held and key != "data" else key


def no_value(key: str) -> str:
    parent, _, name = key.rpartition(".")
    group, _, own = parent.partition(".")
    if name == "kind" and group in LISTS:
        return (
            f"{parent} is not chosen: write {group}=[{own},…], for a set of data may have chosen others; or begin its "
            f"YAML file with defaults: [/schema/{group}/KIND@_here_]"
        )
    if name == "kind":
        return f"{parent} has no kind: begin its YAML file with defaults: [/schema/{parent.split('.')[0]}/KIND@_here_]"
    return f"{key} has no value: it is required, add {key}=…"


def near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""
