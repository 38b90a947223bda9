"""Pages of the reference, written from the specs, the YAML files and the parsers when the site is built.

A page is Markdown; lists of keys are HTML, in which all text is escaped, so that no character of a docstring is markup.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import importlib.metadata
import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.config import reference
from clipx.config.catalogue import Command, Option, commands, folder_of, groups, load_all, options, read_yaml
from clipx.config.entries import Entry, field_docs, spec_entries
from clipx.config.options import typed
from clipx.config.registry import CONF_DIR, LIST_GROUPS, MISSING, kinds
from clipx.config.saved import flatten
from clipx.errors import Exit
from clipx_launch import __main__ as sweep

_FOLDER = "reference"
_PARSERS = {"clipx_launch": sweep.parser(), "clipx.config.reference": reference.parser()}
"""Parsers of the commands that compose no configuration, by module."""
_BY_OPTION = "set by the option"
_OUTSIDE_RUNS = {
    "launcher": "Launchers of sweeps, and of single runs on a cluster: the group `hydra/launcher`. "
    "[Sweeps on a cluster](../guides/launch.md) describes them.",
    "sweeper": "Sweepers, which propose the points of a sweep: the group `hydra/sweeper`. "
    "[Search with Optuna](../guides/sweeps.md#search-with-optuna) describes it.",
    "bench": "Benchmarks, `python -m clipx.bench NAME`: the keys are at the top level.",
}


def pages() -> dict[str, str]:
    """Returns the Markdown of each page by its path in the documentation."""
    load_all()
    written = {group: _group_page(group) for group in groups()}
    written |= {"run": _run_page(), "commands": _commands_page(), "exit_codes": _exit_codes_page()}
    return {f"{_FOLDER}/{name}.md": text for name, text in written.items()}


# ------------------------------------------------------------------------------------------------------------- groups


def _group_page(group: str) -> str:
    found, specs = options(group), dict(sorted(kinds(group).items()))
    keys = {kind: list(spec_entries(spec, None, _prefix(group))) for kind, spec in specs.items()}
    shared = _shared(list(keys.values()))
    common = {entry.key for entry in shared}
    parts = [
        f"# {group}",
        _about_group(group),
        "## Options",
        _definitions(_option_item(group, name, option) for name, option in found.items()),
    ]
    seen: set[str] = set()
    if shared:
        parts += ["## Keys of all options", _keys(shared, seen, unset=_BY_OPTION)]
    for kind, spec in specs.items():
        own = _with_values([entry for entry in keys[kind] if entry.key not in common], group, kind, found)
        parts += [f"## {kind}", _class_doc(spec), *([_keys(own, seen, unset=_BY_OPTION)] if own else [])]
    return "\n\n".join(parts) + "\n"


def _prefix(group: str) -> str:
    """Returns the key of an option of a group, with a dot."""
    if group == "bench":
        return ""
    return f"{folder_of(group).replace('/', '.')}.{'NAME.' if group in LIST_GROUPS else ''}"


def _choice(group: str, name: str) -> str:
    """Returns the override that selects an option."""
    if group == "bench":
        return f"python -m clipx.bench {name}"
    return f"{folder_of(group)}={f'[{name}]' if group in LIST_GROUPS else name}"


def _about_group(group: str) -> str:
    run = field_docs(kinds("")["run"])
    about = _paragraph(run[group]) if group in run else _OUTSIDE_RUNS.get(group, f"The group `{folder_of(group)}`.")
    several = " NAME stands for the name of an option." if group in LIST_GROUPS else ""
    return f"{about}\n\nSelect an option by `{_choice(group, 'NAME')}`.{several}"


def _option_item(group: str, name: str, option: Option) -> tuple[str, str]:
    """Returns the override that selects an option, and its description: comment, values and other options."""
    about = _comment(option.files[0]) or _first_paragraph(kinds(group)[option.kind])
    lines = [_inline(about), f'Keys: <a href="#{option.kind}">{html.escape(option.kind)}</a>.']
    for label, values in (("Sets", _set_by(option)), ("Selects", _selected_by(option, folder_of(group)))):
        if values:
            lines.append(f"{label} " + " ".join(_code(f"{key}={typed(value)}") for key, value in values.items()))
    return _term(_choice(group, name)), "<br>".join(lines)


def _comment(path: Path) -> str:
    """Returns the comment at the start of a YAML file, as one line."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    shown = [line for line in lines if not re.match(r"#\s*(@package|yaml-language-server:)", line)]
    return " ".join(line.removeprefix("#").strip() for line in shown)


def _leaves(path: Path) -> dict[str, Any]:
    """Returns the values that a YAML file sets, by dotted key."""
    values = {key: value for key, value in read_yaml(path).items() if key not in ("defaults", "hydra")}
    return dict(flatten(values)) if values else {}


def _set_by(option: Option) -> dict[str, Any]:
    """Returns the values that an option and those that it extends set, by key relative to the group, `image.size`."""
    return {key: value for path in reversed(option.files) for key, value in _leaves(path).items()}


def _selected_by(option: Option, folder: str) -> dict[str, Any]:
    """Returns the options of other groups that an option selects instead of the defaults, by group."""
    items = [item for path in reversed(option.files) for item in read_yaml(path).get("defaults", [])]
    selected = {}
    for key, value in (pair for item in items if isinstance(item, dict) for pair in item.items()):
        name = re.sub(r"^override |@.*$", "", key)  # `override /data`, or `text` of the group `model`
        selected[name.removeprefix("/") if name.startswith("/") else f"{folder}/{name}"] = value
    return selected


def _shared(keys: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Returns the keys that all kinds of a group have, with the same type and description."""
    first, *others = [{(entry.key, entry.type, entry.rules, entry.doc): entry for entry in found} for found in keys]
    shared = []
    for facts, entry in first.items():
        if others and all(facts in other for other in others):
            same = all(other[facts].value == entry.value for other in others)
            shared.append(entry if same else dataclasses.replace(entry, value=MISSING))
    return shared


def _with_values(found: Sequence[Entry], group: str, kind: str, known: Mapping[str, Option]) -> list[Entry]:
    """Returns entries with the values that the option of this name sets, or the only option of this kind."""
    named = [option for option in known.values() if option.kind == kind]
    option = known[kind] if kind in known else named[0] if len(named) == 1 else None
    return _with_set(found, _set_by(option), _prefix(group)) if option else list(found)


def _with_set(found: Iterable[Entry], values: Mapping[str, Any], prefix: str = "") -> list[Entry]:
    """Returns entries with the values that YAML files set. `prefix`: of their keys."""
    typed_values = {f"{prefix}{key}": typed(value) for key, value in values.items()}
    return [dataclasses.replace(entry, value=typed_values.get(entry.key, entry.value)) for entry in found]


# ---------------------------------------------------------------------------------------------------------------- run


def _run_page() -> str:
    run = kinds("")["run"]
    known = {field.name for field in dataclasses.fields(run)} & set(groups())
    found = [entry for entry in spec_entries(run, None, "") if entry.key.partition(".")[0] not in known]
    nested = list(dict.fromkeys(entry.key.partition(".")[0] for entry in found if "." in entry.key))
    own = [entry for entry in found if entry.key.partition(".")[0] not in nested]
    seen: set[str] = set()
    keys = _keys(_with_set(own, _leaves(CONF_DIR / "train.yaml")), seen)
    parts = ["# Keys of a run", "Keys of `python -m clipx.train` outside of groups.", keys]
    for key in nested:
        below = [entry for entry in found if entry.key.startswith(f"{key}.")]
        parts += [f"## {key}", _paragraph(field_docs(run)[key]), _keys(below, seen)]
    for group in sorted(known):
        parts += [f"## [{group}]({group}.md)", _paragraph(field_docs(run)[group])]
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------------- commands


def _commands_page() -> str:
    parts = [
        "# Commands",
        "Each command is a Python module, which `clipx NAME` and a script start as well. Commands with keys are "
        "configured by overrides, `key=value`, and share these flags: `--help` prints examples, the options of the "
        "groups and the keys, `--help KEY` the description of a key or of all keys of a group, "
        "`--cfg job` the configuration without running the command, "
        "`--config-dir FOLDER` adds a folder of options, `-m` runs a sweep over comma-separated values, and "
        "`-sc install=bash` prints the code of tab completion. [Exit codes](exit_codes.md) are the same for all.",
    ]
    scripts = _scripts()
    for command in commands():
        parts += _command_section(command, scripts.get(command.module))
    for module, parser in sorted(_PARSERS.items()):
        parts += _parser_section(module, parser, scripts.get(module))
    return "\n\n".join(parts) + "\n"


def _scripts() -> dict[str, str]:
    """Returns the name of the installed script of each module that has one."""
    found = importlib.metadata.entry_points(group="console_scripts")
    return {entry.module.removesuffix(".__main__"): entry.name for entry in found if entry.module.startswith("clipx")}


def _head(module: str, script: str | None) -> list[str]:
    return [f"## {module}", f"`python -m {module}`" + (f", installed as `{script}`." if script else ".")]


def _command_section(command: Command, script: str | None) -> list[str]:
    parts = _head(command.module, script)
    if command.config == "bench":
        return [*parts, "Runs a benchmark: `python -m clipx.bench NAME [KEY=VALUE …]`. [bench](bench.md) lists them."]
    template = read_yaml(command.file)["hydra"]["help"]["template"]
    paragraphs = [text for text in template.split("\n\n") if "$" not in text and not text.endswith(":")]
    for text in paragraphs:
        examples = text.startswith(("python -m", "apt-get"))
        parts.append(f"```bash\n{text.rstrip()}\n```" if examples else _paragraph(" ".join(text.split())))
    if command.config == "train":
        return [*parts, "[Keys of a run](run.md) lists the keys and groups."]
    return [*parts, *_keys_of_command(command)]


def _keys_of_command(command: Command) -> list[str]:
    """Returns the keys and the groups of a command; of `clipx.plan` those that a run does not have."""
    run = {field.name for field in dataclasses.fields(kinds("")["run"])} if command.config == "plan" else set()
    selected = [field.name for field in dataclasses.fields(command.spec) if field.name in {*groups()} - run]
    found = [
        entry
        for entry in spec_entries(command.spec, None, "")
        if entry.key not in {*selected, *run} and "." not in entry.key
    ]
    parts = ["Keys, in addition to those of [a run](run.md):"] if run else []
    parts.append(_keys(_with_set(found, _leaves(command.file)), set(), f"{command.config}."))
    if selected:
        parts.append(f"Groups: {', '.join(f'[{group}]({group}.md)' for group in selected)}.")
    return parts


def _parser_section(module: str, parser: argparse.ArgumentParser, script: str | None) -> list[str]:
    parts = [*_head(module, script), _paragraph(parser.description or "")]
    arguments = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    parts += _arguments(arguments)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                parts += [f"### {script or module} {name}", _paragraph(about[name]), *_arguments(command._actions)]
                parts += (
                    [f"```bash\n{inspect.cleandoc(command.epilog.partition(':')[2])}\n```"] if command.epilog else []
                )
    return parts


def _arguments(actions: Iterable[argparse.Action]) -> list[str]:
    """Returns the list of the arguments of a parser, if there are any but --help."""
    items = []
    for action in actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        name = " ".join(part for part in (", ".join(action.option_strings), value) if part)
        items.append((_term(name), _inline(action.help or "")))
    return [_definitions(items)] if items else []


def _exit_codes_page() -> str:
    docs = field_docs(Exit)
    items = [(_term(f"{code.value}", code.name.lower()), _inline(docs[code.name])) for code in sorted(Exit)]
    return "# Exit codes\n\nExit codes of all commands.\n\n" + _definitions(items) + "\n"


# --------------------------------------------------------------------------------------------------------------- HTML


def _keys(found: Iterable[Entry], seen: set[str], anchor: str = "", unset: str = "required") -> str:
    """Returns the list of keys.

    `seen`: keys that have an anchor on the page already; it is updated. `unset`: text for keys without a value.
    """
    items = []
    for entry in found:
        name = "" if entry.key in seen else f' id="{html.escape(anchor + entry.key)}"'
        seen.add(entry.key)
        items.append((_term(entry.key, _facts(entry, unset), name), _inline(entry.doc)))
    return _definitions(items)


def _facts(entry: Entry, unset: str) -> str:
    """Returns the type of a key and its default."""
    if entry.type.endswith("Spec"):
        return "keys below"
    kind = re.sub(r"dict\[str, (\w+)Spec\]", r"\1 options by name", entry.type)
    kind = re.sub(r"list\[\w+Spec\]", "list of groups of keys", kind)
    value = unset if entry.value == MISSING else f"default {entry.value or repr('')}"
    return "; ".join([kind, *entry.rules, value])


def _term(name: str, facts: str = "", attribute: str = "") -> str:
    about = f" ({html.escape(facts)})" if facts else ""
    return f"<dt{attribute}>{_code(name)}{about}</dt>"


def _definitions(items: Iterable[tuple[str, str]]) -> str:
    """Returns a list of definitions, each a term and the HTML of its description."""
    return "\n".join(["<dl>", *(f"{term}\n<dd>{about}</dd>" for term, about in items), "</dl>"])


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _inline(text: str) -> str:
    """Returns the HTML of a docstring: text between backticks is code, and everything else is text."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _paragraph(text: str) -> str:
    return f"<p>{_inline(' '.join(text.split()))}</p>"


def _class_doc(spec: type) -> str:
    return "\n".join(map(_paragraph, inspect.cleandoc(spec.__doc__ or "").split("\n\n")))


def _first_paragraph(spec: type) -> str:
    return " ".join(inspect.cleandoc(spec.__doc__ or "").split("\n\n")[0].split())
