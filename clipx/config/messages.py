"""Formats errors of Hydra, OmegaConf and YAML as one line with the value, the rule and the fix.

The libraries' messages are used where they name these. This module rewrites the messages for unknown keys, unknown
options, missing values and overrides that cannot be parsed, where the libraries give no fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from clipx.compat import root_of
from clipx.config import source
from clipx.config.grammar import FREE_KEYS, ambiguous, unreadable
from clipx.config.options import any_of, default_of, rules_of, usual
from clipx.config.registry import (
    DESCRIBED,
    LIST_GROUPS,
    MISSING,
    NESTED_OPTIONS,
    SAVED,
    kinds,
    missing_text,
    option_files,
)
from clipx.config.renamed import current_name, group_key, removed
from clipx.config.suggestions import did_you_mean
from clipx.errors import ClipxError

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)

_LISTED = 280  # characters of the keys that a message lists

NESTED_GROUPS = {f"{group}.{part}": f"{group}/{part}" for group, parts in NESTED_OPTIONS.items() for part in parts}
"""Groups of the options that an option contains, by their keys."""


def one_line(error: BaseException) -> str:
    """Returns an error of Hydra, OmegaConf or YAML as one line with value, rule and fix."""
    text = " ".join(str(error).split())
    raised: BaseException | None = error
    while raised is not None and not isinstance(raised, ClipxError):
        raised = raised.__cause__ or raised.__context__
    if raised is not None:  # by a resolver
        return str(raised)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    if found := re.match(r"Ambiguous value for argument '(.*?)'\n1\.", str(error), re.DOTALL):
        return ambiguous(found[1])
    if isinstance(error, yaml.YAMLError):
        return f"YAML cannot be read: {text}: correct the file"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if not _options(group) and option_files(group.partition("/")[0]):  # an option's name with a slash, as ViT-B/32
            group, _, name = f"{group}/{name}".partition("/")
        if group:
            hidden = (SAVED, DESCRIBED, *NESTED_OPTIONS.get(group, ()))  # no options that can be typed
            named = [option for option in error.options or () if option not in hidden]
            return unknown_option(group, name, named or _options(group)) + _file(text)
    cause = _root(error)
    if cause is None:
        return text
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        parent = cause.parent_node
        siblings = [str(name) for name in parent if name != "hydra"] if isinstance(parent, DictConfig) else []
        key = f"{_list_of(cause.object_type)}{cause.full_key}"
        place = key.rpartition(".")[0]
        if place in NESTED_GROUPS and isinstance(parent, DictConfig) and OmegaConf.is_missing(parent, "kind"):
            return missing_value(f"{place}.kind") + _file(text)
        return unknown_key(key, siblings, parent, OmegaConf.get_type(parent) is dict) + _file(text)
    key, message = cause.full_key or "", str(cause).splitlines()[0]
    if not isinstance(cause, ValidationError):
        return f"{key}: {message}{_file(text)}"
    if cause.parent_node is None:  # OmegaConf does not know the key of a node without a parent
        message = message if cause is error else f"{str(error).splitlines()[0]}: {message}"
        return f"{message}: add an option of a group by +GROUP@KEY=OPTION, e.g. +data@data.sources.NAME=csv"
    if cause.value == {} and not isinstance(cause.child_node, DictConfig):  # of KEY.NAME=…
        return f"{key} is a single value, which has no keys: write {key}=VALUE{_file(text)}"
    value = "null" if cause.value is None else cause.value
    rule = _wrong_type(key, message, cause)
    return f"{key}={value}{rule or f': {message}{_fix(key, cause.child_node)}'}{_file(text)}"


_TYPES = {"Integer": "a whole number", "Float": "a number"}
_WRONG = re.compile(r"could not be converted to (\w+)|expected one of \[(.*)\]|is not a (valid bool)|is not (Optional)")


def _wrong_type(key: str, message: str, error: ValidationError) -> str | None:
    """Returns the rule and the fix for null, or a text that is no number, truth value or choice; None for others."""
    found = _WRONG.search(message)
    if found is None or isinstance(error.child_node, DictConfig):
        return None
    number, listed, boolean, null = found.groups()
    cls = OmegaConf.get_type(error.parent_node) if isinstance(error.parent_node, DictConfig) else None
    known = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    field, choices = known.get(key.rpartition(".")[2]), (listed or "").split(", ")
    default = MISSING if field is None else default_of(field)
    fix = usual(default, "give a value")
    if null:
        return f" must not be null: {fix}"
    if listed or boolean:
        choices = choices if listed else ["true", "false"]
        return f" must be {any_of(choices)}: {fix}{did_you_mean(str(error.value), choices)}"
    rules = None if field is None else rules_of(field)
    bounds = "" if rules is None else rules.expected
    between = " of " if bounds.startswith("at") else " "
    return f" must be {_TYPES.get(number, number)}{between if bounds else ''}{bounds}: {fix}"


MISPLACED_ERRORS = (TypeError, ValueError, IndexError, AssertionError, RecursionError)
"""What OmegaConf raises for a key where none can be, and Hydra for a defaults list that includes its own file."""


def misplaced_key(error: BaseException, overrides: Sequence[str]) -> str | None:
    """Returns the message for an override of a key of a list or of null, which OmegaConf rejects without naming it.

    None: `error` has another cause.
    """
    if isinstance(error, RecursionError):
        return f"the defaults list of {source.latest} includes this file again: correct the file"
    if isinstance(error, AssertionError):
        keys = {typed: typed.partition("=")[0].lstrip("+~") for typed in overrides}
        for typed, key in keys.items():
            group = key.partition(".")[0]
            if str(error).startswith("Unexpected type") and group != key and group not in keys.values():
                return f"{typed} sets a key of {group}, which is null: choose an option first, {group}=…"
        return None
    found = re.search(r"^Index '(.*)' \(str\) is not an int|^invalid literal for int\(\) .*: '(.*)'$", str(error))
    if found is None and not isinstance(error, IndexError):
        return None
    name = "" if found is None else found[1] or found[2]
    for typed in overrides:
        key, dot, rest = typed.partition("=")[0].lstrip("+~").partition(f".{name}" if name else "[")
        if dot and (not name or not rest or rest[0] in ".["):
            return f"{typed} sets a part of a list: give the whole list, {key}=[a,b]"
    return None


def _file(text: str) -> str:
    """Returns ` (in GROUP/NAME.yaml)` if Hydra's message begins with `In 'GROUP/NAME': …`, else an empty string."""
    named = re.match(r"In '(?!hydra/|schema/)([^']+/[^']+)'", text)
    return f" (in {named[1]}.yaml)" if named else ""


def _root(error: BaseException) -> OmegaConfBaseException | None:
    """Returns the OmegaConf error that caused Hydra's error and knows the key. None: there is none."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OmegaConfBaseException):
        found = found.__cause__ or found.__context__
    return found


def _list_of(cls: type | None) -> str:
    """Returns the key, with a dot, of RunSpec's list whose items have this class: OmegaConf omits it from the key."""
    run = kinds("").get("run")
    hints = typing.get_type_hints(run) if run else {}  # a command that reads no run does not import its class
    return next((f"{key}." for key, hint in hints.items() if typing.get_args(hint) == (cls,)), "")


def _fix(key: str, child: Any) -> str:
    """Returns the fix for a value given to a key that contains other keys, else an empty string."""
    if not isinstance(child, DictConfig):
        return ""
    group = key.partition(".")[0]
    if group in LIST_GROUPS:
        return f": choose options by {group}=[…] and set their values by {group}.OPTION.KEY=…"
    plus = "+" if OmegaConf.get_type(child) is dict and key not in FREE_KEYS else ""
    return f": set its values by {plus}{key}.KEY=…"


def _options(group: str) -> list[str]:
    """Returns the options of a group of YAML files, the kinds of a group of schemas, or what the ConfigStore has."""
    schema, _, name = group.rpartition("/")
    if schema == "schema":
        return list(kinds(name))
    stored: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        stored = stored.get(part, {})
    return list(option_files(group)) or [name.removesuffix(".yaml") for name in stored]


def unknown_option(group: str, name: str, options: Sequence[str]) -> str:
    """Returns the message for an option that does not exist. `options`: those of the group."""
    if not options and group.startswith("schema/"):  # of an installed package, by the entry point `clipx.options`
        return f"{group}={name} is not registered: install the package that has it (in a checkout: pip install -e .)"
    if not options:
        return f"{group}={name} is not an option: the group {group} has none, check its name or give --config-dir"
    number = "any of" if group in LIST_GROUPS else "one of"
    fix = f"; for none write {group}=[]" if group in LIST_GROUPS else ""
    known = f"{', '.join(sorted(options))}{did_you_mean(name, options)}"
    return f"{group}={name} is not an option: choose {number} {known}{fix}{missing_text()}"


def unknown_key(key: str, siblings: Sequence[str], node: Node | None = None, free: bool = False) -> str:
    """Returns the message for a key that does not exist.

    `siblings`: the keys in its place. `node`: of the configuration, in which the key that is meant is searched. `free`:
    whether new keys may be added here.
    """
    from clipx.config.meant import meant, settable_keys  # imports the docstrings of keys and the flags of open_clip

    parent, dot, name = key.rpartition(".")
    if new := current_name(group_key(key), siblings):
        return f"{key} is now {parent}{dot}{new}: write {parent}{dot}{new}=…"
    if gone := removed(group_key(key), siblings):
        return f"{key} no longer exists: {gone.reason}; remove it"
    root = None if node is None else root_of(node)
    command = root if isinstance(root, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(root)) else None
    settable = siblings if command is None or parent else settable_keys(command)
    known = [sibling for sibling in siblings if sibling != "kind" and sibling in settable]
    close = did_you_mean(name, known)
    elsewhere = "" if command is None or close or parent in LIST_GROUPS else meant(key, command)
    if elsewhere and not parent:
        return f"{key} is not a key here: it is {elsewhere}"
    listed = ", ".join(known)
    if len(listed) > _LISTED:
        few = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
        group = parent.partition(".")[0]
        listed = f"{', '.join(few)} and {len(known) - len(few)} others, which --help {group} lists".replace("  ", " ")
    rule = f"the keys are {listed}{close}" if known else "there are none yet"
    fix = ""
    if parent in LIST_GROUPS:
        fix = f"; choose options by {parent}=[…]"
    elif free:
        fix = f"; add it by +{option_key(key)}=…"
    elif elsewhere:
        fix = f"; or is it {elsewhere}?"
    return f"{key} is not a key here: {rule}{fix}"


def option_key(key: str) -> str:
    """Returns the left-hand side of the override that selects the option at a key.

    For a source of a mixture and for a data set of an evaluator it includes the group: `data@KEY`. For a part of
    another option it is the group, as `model/text`.
    """
    if key in NESTED_GROUPS:
        return NESTED_GROUPS[key]
    return f"data@{key}" if key != "data" and group_key(key) == "data" else key


def missing_value(key: str) -> str:
    """Returns the message for a required key without a value."""
    nested = key.removesuffix(".kind")
    if nested in NESTED_GROUPS:
        group, _, option = nested.partition(".")
        return (
            f"{nested} is not selected: add an option of {NESTED_GROUPS[nested]} to the defaults of the YAML file of "
            f"{group}, as in defaults: [/schema/{group}/KIND@_here_, {option}: NAME]"
        )
    parent, _, name = key.rpartition(".")
    group, _, option = parent.partition(".")
    if name == "kind" and group in LIST_GROUPS:
        return (
            f"{parent} is not selected: write {group}=[{option},…], because data=… may select others; or begin "
            f"its YAML file with defaults: [/schema/{group}/KIND@_here_]"
        )
    if name == "kind":
        return f"{parent} has no kind: begin its YAML file with defaults: [/schema/{group}/KIND@_here_]"
    return f"{key} has no value: it is required, add {key}=…"
