"""Errors that a user can act on: one line, naming the value, the rule and the fix. Also the words for Hydra's own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum


class Exit(IntEnum):
    """What the exit code of a command says to the shell, to SLURM and to whoever starts runs again."""

    FINISHED = 0
    FAILED = 1  # an error: starting it again changes nothing before it is put right
    CONFIGURATION = 2
    IN_USE = 3  # another job works in the run directory
    WATCHDOG = 70  # no step for distributed.watchdog_s; stacks.rank*.txt in the run directory say where it stood
    NOT_SYNCED = 74  # finished, but what it uploads is not all there
    REQUEUE = 75  # stopped by a signal and saved: start it again with resume=auto
    ABORTED = 130  # by a second SIGINT, or before training began; the last checkpoint is whole


class ClipxError(Exception):
    """Something the user can put right. The entry points print it as one line and exit with `exit_code`."""

    exit_code = Exit.FAILED


class ConfigError(ClipxError):
    """A value of the run's configuration breaks a rule."""

    exit_code = Exit.CONFIGURATION


class DataError(ClipxError):
    """The data cannot be read as configured."""


class StorageError(DataError):
    """A storage failed for as long as it was tried: what it holds is unknown, and may be there another time."""


class CheckpointError(ClipxError):
    """No checkpoint can be read, or the run directory belongs to another run."""


class Locked(ClipxError):
    """Another job works in the run directory."""

    exit_code = Exit.IN_USE


class PeerLost(ClipxError):
    """Another rank is gone, or does not answer."""


class NotSynced(ClipxError):
    """The run is finished, but what it uploads is not all there."""

    exit_code = Exit.NOT_SYNCED


class Stopped(ClipxError):
    """No error: a signal stopped the run before its end, and it has saved. Raised on all ranks together."""

    exit_code = Exit.REQUEUE


def require(ok: bool, message: str) -> None:
    """Raises ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def placed(error: ClipxError, place: str, keys: Iterable[str]) -> ClipxError:
    """An error of the data at `place`, its `keys` named where they are: a spec knows the name of its group only.

    So `data.path` becomes `data.sources.NAME.path` for a source of a mixture, `evaluator.EVALUATOR.sets.NAME.path` for
    a set of an evaluator.
    """
    return type(error)(re.sub(rf"\bdata\.(?=({'|'.join(map(re.escape, keys))})\b)", f"{place}.", str(error)))


# --------------------------------------------------------------------------------- words for the configuration's

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
