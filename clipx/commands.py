"""Commands by name: those of the core, and those that installed packages name under the entry point `clipx.commands`.

Imports no other module of clipx: `clipx.train` handles signals before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

_CORE = ("clipx.train", "clipx.evaluate", "clipx.export", "clipx.bench")
_SWEEP = "clipx_launch"
_PACKAGE = Path(__file__).parent
_FIRST_LINE = re.compile(r'"""`.+?`[^:]*: (.+?)(?<=\w)[.:;](?:\s|"""|$)')


def name_of(module: str) -> str:
    """Returns the name of a command of clipx by its module, also after `clipx-` that of its script."""
    return "sweep" if module == _SWEEP else module.rpartition(".")[2].replace("_", "-")


@functools.cache
def entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Returns the entry points of the commands outside the core, by the name of the command."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    named = importlib.metadata.entry_points(group="clipx.commands")
    for entry in sorted(named, key=lambda entry: (entry.name, not entry.value.startswith("clipx."))):  # ours before
        taken = found.get(entry.name)
        if entry.name in map(name_of, (*_CORE, _SWEEP)) or (taken is not None and taken.value != entry.value):
            package = entry.dist.name if entry.dist else entry.value
            refuse(
                f"{entry.value}, which the installed package {package} names under clipx.commands, cannot be started, "
                f"since there is a command {entry.name}: give it another name, or uninstall the package"
            )
        found[entry.name] = entry
    return found


@functools.cache
def commands() -> dict[str, str]:
    """Returns the module of each command, as `python -m` takes it, by name in the order of their list."""
    others = {name: _flat(name) or entry.module for name, entry in entry_points().items()}
    return {**{name_of(module): module for module in _CORE}, **others, name_of(_SWEEP): _SWEEP}


def _flat(name: str) -> str | None:
    """Returns the module `clipx.NAME` of a command of clipx, None if there is none."""
    module = name.replace("-", "_")
    return f"clipx.{module}" if (_PACKAGE / f"{module}.py").is_file() else None


def module_of(word: str) -> str | None:
    """Returns the module of the command with a name, in which `_` may stand for `-`. None: there is none."""
    name = word.replace("_", "-")
    core = {name_of(module): module for module in (*_CORE, _SWEEP)}
    return core.get(name) or commands().get(name)  # the metadata of the installed packages is read for others alone


def implementation(module: str) -> str:
    """Returns the module that has the body and the options of the command `module`."""
    found = (entry.module for name, entry in entry_points().items() if module in (_flat(name), entry.module))
    return module if module in _CORE else next(found, module)


def summary_of(module: str) -> str:
    """Returns what a command does, from the first line of its module, which is not imported."""
    if module == _SWEEP:
        return "shows, cancels, resumes and compares the runs of sweeps"
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    path = Path(spec.origin)
    with (path if path.stem != "__init__" else path.with_name("__main__.py")).open(encoding="utf-8") as file:
        found = _FIRST_LINE.match(file.readline())
    assert found is not None, module
    return found[1]


def run(name: str, module: str) -> None:
    """Runs the command `name`, whose module is `module`, as `python -m` would."""
    if module in (*_CORE, _SWEEP):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        start(name.replace("_", "-"))


def start(name: str) -> None:
    """Runs a command outside the core, by its name. Ends the process with an error if its package is not there."""
    load(name)()


def load(name: str) -> Callable[[], None]:
    """Returns the function that runs a command, by its name. Ends the process with an error if its package is not
    there."""
    if (module := f"clipx.{name}") in _CORE:
        return partial(run, name, module) if name in ("train", "bench") else importlib.import_module(module).main
    entry = entry_points().get(name)
    if entry is None:
        refuse(f"the command {name} is not registered: install clipx again (in a checkout: pip install -e .)")
    try:
        main: Callable[[], None] = entry.load()
        return main
    except ModuleNotFoundError as error:
        if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
            raise
        refuse(f"the command {name} needs {error.name}, which is not installed: install clipx again")


def refuse(message: str) -> NoReturn:
    """Prints an error, and ends the process with the exit code of a wrong command line."""
    from clipx.escape import print_stderr

    print_stderr(f"error: {message}")
    sys.exit(2)
