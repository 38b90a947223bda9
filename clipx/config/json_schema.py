"""JSON schema (draft 7) of the YAML files of a configuration, for editors and their YAML language server.

conf/schema.json describes the files of a run: `# @package _global_`, as in conf/experiment. conf/schema/NAME.json
describes an option of the group NAME, or the configuration of the command NAME. docs/reference/yaml_schema.md has the
use.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipx.config.catalogue import commands, folder_of, groups, load_all, options
from clipx.config.entries import field_docs, shown_fields
from clipx.config.options import Rules, default_of, facts, rules_of
from clipx.config.registry import LIST_GROUPS, MISSING, NESTED_OPTIONS, file_specs, kinds

Schema = dict[str, Any]

_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
_INTERPOLATION = r"\$\{|^\?\?\?$"  # `${oc.env:DATA}`, and `???` for a value that the command line gives
_SCALARS: dict[type, tuple[list[str], str]] = {
    bool: (["boolean"], "true or false"),
    int: (["integer"], "an integer"),
    float: (["number"], "a number"),
}
_DEFAULTS: Schema = {
    "type": "array",
    "description": "Hydra's defaults list: the files that this one extends, and the options that it selects.",
    "items": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "additionalProperties": {"type": ["string", "array", "null"]}},
        ]
    },
}
_HYDRA: Schema = {
    "type": "object",
    "description": "Hydra's own keys, such as sweep and sweeper, and the keys of the launcher. They are not checked.",
}


def schema_files(path: Path, folders: Sequence[Path] = ()) -> dict[Path, str]:
    """Returns the texts of the files of the schema by their paths: `path`, and NAME.json in a folder next to it.

    `folders`: folders of --config-dir, whose options the schema has as well.

    Language servers merge a part of a schema, `schema.json#/definitions/objective`, with its root. So the files of
    the groups and of the commands have small schemas that refer to their definition.
    """
    load_all(folders)
    found = _Writer(folders).schema()
    files = {*groups(), *(command.config for command in commands()), *file_specs}
    names = [name for name in found["definitions"] if name in files]
    parts = {name: {**_DRAFT, "$ref": f"../{path.name}#/definitions/{name}"} for name in names}
    texts = {path.with_suffix("") / f"{name}.json": json.dumps(part) for name, part in parts.items()}
    return {path: json.dumps(found, indent=1, ensure_ascii=False)} | texts


class _Writer:
    """Writes the definition of each spec once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.definitions: dict[str, Schema] = {}
        self.kinds = {group: dict(sorted(kinds(group).items())) for group in groups()}
        # names of the options of each kind of each group
        self.names: dict[str, dict[str, list[str]]] = {group: {} for group in self.kinds}
        for group, names in self.names.items():
            for name, option in options(group, folders).items():
                names.setdefault(option.kind, []).append(name)

    def schema(self) -> Schema:
        for group in self.kinds:
            self._add_group(group)
        run = self._properties(kinds("")["run"])
        for command in commands():
            if command.config not in ("train", "bench"):  # the root; the benchmarks are options of the group bench
                keys = self._properties(command.spec)
                shared = [key for key in keys if keys[key] == run.get(key) and key not in self.kinds]
                own = keys | {key: _ref(f"/properties/{key}") for key in shared}
                self.definitions[command.config] = self._file(own)
        for folder, spec in file_specs.items():
            self.definitions[folder] = self._object(spec)
        definitions = dict(sorted(self.definitions.items()))
        return {**_DRAFT, "title": "clipx", **self._file(run), "definitions": definitions}

    def _object(self, spec: type) -> Schema:
        """Returns the schema of an object. A file of `file_specs` has all required keys; others complete each other."""
        whole = any(spec in _with_nested(one) for one in file_specs.values())
        return _object(self._properties(spec), _required(spec) if whole else [])

    def _properties(self, spec: type) -> Schema:
        hints, docs = typing.get_type_hints(spec), field_docs(spec)
        found = {}
        for field in shown_fields(spec):
            accepted, rules = self._type(hints[field.name]), rules_of(field)
            if rules is not None:
                accepted = _bounded(accepted, rules)
            about = " ".join([docs.get(field.name, ""), *([f"({'; '.join(facts(field))})"] if facts(field) else [])])
            found[field.name] = {"description": about, **accepted, **_default(field)}
        return found

    def _add_group(self, group: str) -> None:
        """Adds GROUP.KIND for each kind, GROUP._any with the keys of all kinds, and GROUP for the file of an option."""
        specs = {kind: self._properties(spec) for kind, spec in self.kinds[group].items()}
        variants: dict[str, dict[str, list[str]]] = {}  # by key and schema: the kinds
        for kind, keys in specs.items():
            for key, found in keys.items():
                variants.setdefault(key, {}).setdefault(json.dumps(found), []).append(kind)
        shared = {key: _merged(found) for key, found in variants.items()}
        self.definitions[f"{group}._any"] = _object(shared)
        for kind, keys in specs.items():
            path = f"/definitions/{group}._any/properties"
            own = {key: _ref(f"{path}/{key}") if shared[key] == found else found for key, found in keys.items()}
            self.definitions[f"{group}.{kind}"] = _object(own)
        self.definitions[group] = self._option_file(group)

    def _option_file(self, group: str) -> Schema:
        """Returns the schema of an option of a group: its defaults list selects the kind, which has the keys.

        A kind that is not registered, as of a plug-in, has any keys.
        """
        rules: list[Schema] = []
        known: list[Schema] = [{"type": "string", "pattern": "^/schema/"}]
        for kind in self.kinds[group]:
            schemas = [f"/schema/{group}/{kind}@_here_", f"/schema/{group}/{kind}"]
            names = self.names[group].get(kind, [])
            names = [*names, *(f"/{folder_of(group)}/{name}" for name in names)]
            known.append({"enum": [*schemas, *names, *(f"{name}@_here_" for name in names)]})
            keys = self._copied(f"{group}.{kind}")
            rules.append({"if": _defaults_contain(known[-1]), "then": keys})
            nested = NESTED_OPTIONS.get(group, {})  # selected in the defaults list
            required = [name for name in _required(self.kinds[group][kind]) if name not in nested]
            if required and group != "bench":  # conf/bench.yaml gives those of benchmarks
                rules.append({"if": _defaults_contain({"enum": schemas}), "then": {"required": required}})
        rules.append({"if": {"not": _defaults_contain({"anyOf": known})}, "then": self._copied(f"{group}._any")})
        return {"type": "object", "properties": {"defaults": _DEFAULTS}, "allOf": rules}

    def _copied(self, name: str) -> Schema:
        """Returns the schema of a definition with the additional key `defaults`, by references to its keys."""
        keys = {key: _ref(f"/definitions/{name}/properties/{key}") for key in self.definitions[name]["properties"]}
        return _object({"defaults": True, **keys})

    def _file(self, keys: Schema) -> Schema:
        """Returns the schema of a file with keys of several groups.

        An option that the file selects by `override /GROUP: OPTION` restricts the keys of the group.
        """
        rules, keys = [], dict(keys)
        for group in self.kinds:
            if keys.get(group, {}).get("$ref") != f"#/definitions/{group}._any":
                continue
            keys[group] = {"description": keys[group]["description"]}
            known = []
            for kind, names in sorted(self.names[group].items()):
                entry = f"override /{group}"
                known.append({"required": [entry], "properties": {entry: {"enum": names}}, "type": "object"})
                then = {"properties": {group: _ref(f"/definitions/{group}.{kind}")}}
                rules.append({"if": _defaults_contain(known[-1]), "then": then})
            then = {"properties": {group: _ref(f"/definitions/{group}._any")}}
            rules.append({"if": {"not": _defaults_contain({"anyOf": known})}, "then": then})
        return _object({"defaults": _DEFAULTS, "hydra": _HYDRA, **keys}) | ({"allOf": rules} if rules else {})

    def _type(self, hint: Any) -> Schema:
        """Returns the schema of a value of a type."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return _optional(self._type(next(part for part in arguments if part is not types.NoneType)))
        if hint in _SCALARS:
            names, text = _SCALARS[hint]
            return _interpolated({"type": names}, text)
        if hint is str:
            return {"type": ["string", "number"]}
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return {"anyOf": [{"enum": list(hint.__members__)}, {"type": "string", "pattern": _INTERPOLATION}]}
        if origin is list:
            return _interpolated({"type": ["array"], "items": self._type(arguments[0])}, "a list")
        if origin is dict:
            return self._dictionary(arguments[1])
        if dataclasses.is_dataclass(hint):
            return self._spec(typing.cast("type", hint))
        return {}  # Any

    def _dictionary(self, hint: Any) -> Schema:
        values = self._type(hint)
        named: Schema = {}
        group = values.get("$ref", "").removeprefix("#/definitions/").removesuffix("._any")
        if group in LIST_GROUPS:  # an option has its own name as its key
            for kind, names in self.names[group].items():
                named |= {name: _ref(f"/definitions/{group}.{kind}") for name in names}
        return _interpolated(
            {"type": ["object"], "properties": named, "additionalProperties": values}, "keys and values"
        )

    def _spec(self, spec: type) -> Schema:
        for group, specs in self.kinds.items():
            if all(issubclass(found, spec) for found in specs.values()):
                return _ref(f"/definitions/{group}._any")
        name = spec.__name__
        if name not in self.definitions:
            self.definitions[name] = {}  # a spec that contains itself
            self.definitions[name] = self._object(spec)
        return _ref(f"/definitions/{name}")


def _with_nested(spec: type) -> list[type]:
    """Returns a class, and the dataclasses of which it has values by name."""
    held = [of for hint in typing.get_type_hints(spec).values() for of in typing.get_args(hint)[-1:]]
    return [spec, *(typing.cast("type", of) for of in held if dataclasses.is_dataclass(of))]


def _required(spec: type) -> list[str]:
    return [field.name for field in shown_fields(spec) if default_of(field) == MISSING]


def _object(properties: Schema, required: Sequence[str] = ()) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False}


def _ref(path: str) -> Schema:
    return {"$ref": f"#{path}"}


def _defaults_contain(item: Schema) -> Schema:
    return {"required": ["defaults"], "properties": {"defaults": {"contains": item}}}


def _interpolated(found: Schema, text: str) -> Schema:
    """Adds interpolations to the values that a schema accepts. `text` names the others in the editor's message."""
    return {
        **found,
        "type": [*found["type"], "string"],
        "pattern": _INTERPOLATION,
        "patternErrorMessage": f"Give {text}, or an interpolation ${{…}}",
    }


def _bounded(found: Schema, rules: Rules) -> Schema:
    """Adds the bounds and choices of a key to the values that a schema accepts."""
    bounds = {"minimum": rules.ge, "exclusiveMinimum": rules.gt, "maximum": rules.le, "exclusiveMaximum": rules.lt}
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    if rules.choices:
        words = "|".join([*map(re.escape, rules.choices), *([r"\d+"] if rules.bounds else [])])
        others = ["boolean"] if "true" in rules.choices else []
        pattern = rf"^(?:{words})$|{_INTERPOLATION}"
        return {**found, **limits, "type": [*found["type"], *others], "pattern": pattern}
    if "items" in found:
        size = {} if rules.length is None else {"minItems": rules.length, "maxItems": rules.length}
        return {**found, **size, "items": {**found["items"], **limits}}
    return {**found, **limits}


def _optional(found: Schema) -> Schema:
    """Adds null to the values that a schema accepts."""
    if "type" in found:
        return {**found, "type": [*found["type"], "null"]}
    if "anyOf" in found:
        return {"anyOf": [*found["anyOf"], {"type": "null"}]}
    return {"anyOf": [found, {"type": "null"}]} if found else found


def _default(field: dataclasses.Field[Any]) -> Schema:
    value = default_of(field)
    if value == MISSING or dataclasses.is_dataclass(value) or value == {}:
        return {}
    return {"default": value.name if isinstance(value, enum.Enum) else value}


def _merged(variants: dict[str, list[str]]) -> Schema:
    """Returns the schema of a key that has another one in several kinds. `variants`: the kinds by schema as JSON."""
    found = [(json.loads(text), names) for text, names in variants.items()]
    if len(found) == 1:
        return typing.cast("Schema", found[0][0])
    types_of = [{k: v for k, v in one.items() if k not in ("description", "default")} for one, _ in found]
    types_of = [one for i, one in enumerate(types_of) if one not in types_of[:i]]
    texts: dict[str, list[str]] = {}
    for one, names in found:
        texts.setdefault(one["description"], []).extend(names)
    description = "\n\n".join(
        f"{', '.join(names)}: {text}" if len(texts) > 1 else text for text, names in texts.items()
    )
    return {"description": description, **(types_of[0] if len(types_of) == 1 else {"anyOf": types_of})}
