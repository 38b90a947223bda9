"""Command line of a command: composes, checks and runs. An error of the user is one line and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode

from clipx.commands import module_of
from clipx.compat import get_args_parser
from clipx.config import plugins
from clipx.config.compose import checked, command_line, compose_config, prepare, task_overrides, with_run_dir
from clipx.config.grammar import hydra_override
from clipx.config.messages import COMPOSITION_ERRORS, MISPLACED_ERRORS, misplaced_key, one_line
from clipx.config.registry import CONF_DIR
from clipx.config.typed import check_typed
from clipx.distributed.launch_env import rank_and_world, rank_or_none
from clipx.errors import (
    ClipxError,
    ConfigError,
    Exit,
    OutputError,
    Stopped,
    disk_failure,
    exhausted,
    require,
    require_effect,
)
from clipx.escape import EscapedLogRecord, escaped, is_text, print_stderr, shortened
from clipx.output import flush_output, lose_output, open_output
from clipx.storage.url import redacted
from clipx.version import version_text

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig

_command: ContextVar[str | None] = ContextVar("command", default=None)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Context for the imports of a command. Without garbage collection torch and timm load in half of the time.

    Later collections skip the objects that exist at its end. torch's warnings of C++ are off: its store writes a stack
    trace for each access after rank 0 has ended.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else nanobind reports frozen objects as leaks
        gc.enable()


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Command, which runs when it is called: composes, checks, calls `task`. See `cli`."""

    task: Callable[[Any], Any]
    name: str
    unused: Sequence[str]
    base: Callable[[str, Sequence[str], Sequence[Path]], str]
    of_run: Sequence[str]
    prints: bool
    check: Callable[[Any], Any]
    continues: bool

    def __call__(self) -> None:
        full_error = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are formatted here
        try:
            with with_output():
                errors = _run(self)
        except KeyboardInterrupt:
            print_stderr("interrupted")
            sys.exit(Exit.ABORTED)
        finally:
            del os.environ["HYDRA_FULL_ERROR"]
            if full_error is not None:
                os.environ["HYDRA_FULL_ERROR"] = full_error
        for error in errors:
            print_error(error, full_error == "1")
        if errors:
            exit_with(errors[0])

    def check_overrides(self, overrides: Sequence[str], name: str) -> None:
        """Raises ConfigError for an override of a group that the command, of this name in errors, does not use."""
        for text in overrides:
            places = text.lstrip("+~").partition("=")[0].split("@")  # of a group, and of the package that it fills
            unused = any(place.partition(".")[0] in self.unused for place in places)
            require_effect(not unused, text, f"on {name}")

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns overrides for the composition of the command, and those of the configuration of a run, which it has
        as the value of `changes`. Raises ConfigError."""
        changes = _changes_of_run(words, self.of_run)
        others = [word for word in words if word not in changes]
        if not changes:
            return others, []
        given = [word for word in others if word.lstrip("+~").startswith("changes")]
        require(not given, f"{' '.join(given)} is of the command itself: give the keys of the run alone")
        quoted = ",".join(QuotedString(word, Quote.single).with_quotes() for word in changes)
        return [*others, f"changes=[{quoted}]"], changes


def cli(
    task: Callable[[Any], Any],
    config_name: str,
    unused: Sequence[str] = (),
    base: Callable[[str, Sequence[str], Sequence[Path]], str] = lambda name, *_: name,
    of_run: Sequence[str] = (),
    prints: bool = False,
    check: Callable[[Any], Any] = lambda spec: None,
    continues: bool = False,
) -> CommandLine:
    """Returns the entry point of a command: compose, check, run. An error of the user is one line and an exit code.

    Args:
        task: receives the spec.
        config_name: name of the primary configuration in conf/.
        unused: groups that other options select and the command does not use. An override of one is an error.
        base: returns the primary configuration for the overrides, e.g. that of a run that continues.
        of_run: groups that are those of a run unless the command line chooses an option. Overrides of their keys
            without a choice are those of the run's configuration: the value of the spec's field `changes`.
        prints: the result of the command is what it prints, rather than a run or files.
        check: raises ClipxError for a spec that cannot run, without torch; a launcher calls it before it submits.
        continues: a command that was stopped continues when it is started again.
    """
    return CommandLine(task, config_name, unused, base, of_run, prints, check, continues)


@contextlib.contextmanager
def with_output() -> Iterator[None]:
    """Context of a command that prints. Ends the process with one line if standard output cannot be written."""
    open_output()
    logging.setLogRecordFactory(EscapedLogRecord)
    logging.raiseExceptions = False  # a log line that cannot be written is no traceback
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        print_error(error, full=False)
        sys.exit(error.exit_code)


def _run(command: CommandLine) -> list[ClipxError]:
    """Runs a command, or each point of a sweep. Returns the errors that the user can correct; raises others."""
    failed: list[ClipxError] = []
    started = False
    folders: list[Path] = []
    changes: list[str] = []

    def job(cfg: DictConfig) -> Any:
        nonlocal started
        started = True
        hydra = HydraConfig.get()
        sweep = hydra.mode == RunMode.MULTIRUN
        try:
            if sweep:
                _refuse_other_launchers(hydra)
            else:
                _refuse_options_of_sweeps(hydra)
            command.check_overrides(task_overrides(hydra), hydra.job.name)
            typed = [text for text in task_overrides(hydra) if not (changes and text.startswith("changes="))]
            record_command(command.name, [*typed, *changes], folders)
            if not command.prints:
                lose_output()
            return command.task(checked(with_run_dir(cfg, hydra) if sweep else cfg))
        except BaseException as raised:
            if (error := _correctable(raised)) is None:
                raise
            if not sweep:  # not raised through Hydra, which would print another line
                failed.append(error)
                return None
            failed.append(type(error)(f"point {hydra.job.num} ({command_line(hydra)}): {error}"))
            raise failed[-1] from error

    try:
        check_working_directory()
        if "--version" in sys.argv[1:]:
            print(version_text())
            return []
        arguments = _typed_arguments(command.name)  # options must be registered before Hydra composes
        require(arguments.config_dir != "", "--config-dir= is empty: give a folder that contains config groups")
        folders += [Path(arguments.config_dir)] if arguments.config_dir else []
        words = [] if arguments.shell_completion else arguments.overrides
        if arguments.help:
            print(_help(command, words, folders))
            return []
        prepare(words, folders)
        base = command.base(command.name, words, folders)
        words, own = command.split(words)
        changes += own
        if changes:
            sys.argv[1:] = [*(word for word in sys.argv[1:] if word not in arguments.overrides), *words]
        chosen = arguments.config_name
        of_conf, reason = base == command.name or chosen is None, "with resume=…, whose configuration is the base"
        require_effect(of_conf, f"--config-name={chosen}", reason)
        hydra_main(config_path=str(CONF_DIR), config_name=base, version_base="1.3")(job)()
    except ClipxError as error:
        return failed or [error]
    except COMPOSITION_ERRORS as error:
        failed.append(_worded(error, one_line(error)))
    except MISPLACED_ERRORS as error:
        if (found := _correctable(error)) is not None:
            return [found]
        message = misplaced_key(error, sys.argv[1:])
        if started or (message is None and not isinstance(error, ValueError)):
            raise
        failed.append(_worded(error, message or str(error)))  # else Hydra's error for incompatible flags
    except BaseException as error:
        if (found := _correctable(error)) is None:
            raise
        failed.append(found)
    return failed


def _refuse_options_of_sweeps(hydra: Any) -> None:
    """Raises ConfigError for what only a sweep uses: overrides, and a choice of a file of the user."""
    chosen = [(group, hydra.runtime.choices.get(group)) for group in ("hydra/launcher", "hydra/sweeper")]
    words = [f"{group}={choice}" for group, choice in chosen if choice not in ("basic", "clipx_local", None)]
    for word in [*words, *hydra.overrides.hydra]:
        of_sweeps = re.match(r"[+~]*hydra[./](launcher|sweep|sweeper)\b", word) is not None
        require_effect(not of_sweeps, word, "without -m", "add -m")


def _refuse_other_launchers(hydra: Any) -> None:
    """Raises ConfigError if a point in this process chooses a launcher or sweeper of clipx, which would not run it so:
    the choice is that of an option that is swept over. Of other points `PointComposer` raises it."""
    for group in ("hydra/launcher", "hydra/sweeper"):
        choice, fix = hydra.runtime.choices.get(group), "give it on the command line"
        ours = str(choice).startswith("clipx_")
        require_effect(not ours, f"{group}={choice}", f"in an option that is swept over ({command_line(hydra)})", fix)


def check_working_directory() -> None:
    """Raises ConfigError for a working directory that was removed: Hydra and torch fail in it."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(f"the working directory cannot be used ({error.strerror}): change to another by cd") from None


def _correctable(error: BaseException) -> ClipxError | None:
    """Returns the error that the user can correct: a lack of resources, a fault of a plug-in or a disk; else None."""
    if isinstance(error, ClipxError):
        return error
    found: ClipxError | None = plugins.error_of(error)
    if isinstance(error, Exception):
        found = exhausted(error) or found or disk_failure(error)
    if found is not None:
        found.__cause__ = error
    return found


def _typed_arguments(command: str) -> argparse.Namespace:
    """Parses and checks the command line, and reorders it for Hydra, which accepts no option between overrides."""
    for word in sys.argv[1:]:
        require(is_text(word), f"{escaped(word)} contains an unprintable character: remove it, or rename the file")
    words = list(map(hydra_override, sys.argv[1:]))
    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    if not {"-sc", "--shell-completion"} & set(words):
        typed = sys.argv[1:]
        _, world = rank_and_world()
        check_typed(words, parser, lambda of, flags: of.answer(typed, flags, command, _program(), world))
    arguments = parser.parse_intermixed_args(words)
    for override in arguments.overrides:
        words.remove(override)
    sys.argv[1:] = [*words, *arguments.overrides]
    return arguments


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}: options are written key=value, --hydra-help lists the flags")


def _changes_of_run(words: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Returns the overrides of keys of `groups`, except of a group of which an override chooses or adds an option."""
    typed = OverridesParser.create().parse_overrides(list(words)) if groups else []
    place = {str(word.input_line): (word.package or word.key_or_group).split(".") for word in typed}
    chosen = {word.key_or_group for word in typed if place[str(word.input_line)][0] == word.key_or_group}
    return [text for text, (group, *rest) in place.items() if group in groups and rest and group not in chosen]


def _help(command: CommandLine, words: Sequence[str], folders: Sequence[Path]) -> str:
    """Returns what `--help` prints: with keys these, with choices of groups their keys, else the groups of the command.

    Raises ConfigError.
    """
    from clipx.config.help import help_text, is_group, overview

    overrides = [word for word in words if re.match(r"~|[^=]+=", word)]
    keys = [word for word in words if word not in overrides]
    prepare(overrides, folders)
    cfg = compose_config(command.base(command.name, overrides, folders), overrides, folders, with_hydra=True)
    keys = keys or [key for key in (word.partition("=")[0] for word in overrides) if is_group(cfg, key)]
    return help_text(cfg, keys, folders) if keys else overview(cfg, folders, command.unused)


def _worded(error: Exception, message: str) -> ConfigError:
    worded = ConfigError(message)
    worded.__cause__ = error
    return worded


def record_command(command: str, overrides: Sequence[str], folders: Sequence[str | Path] = ()) -> None:
    """Records what runs now: the command, such as `train`, its overrides, and the folders of --config-dir."""
    options = [word for folder in folders for word in ("--config-dir", str(folder))]
    module = module_of(command) or f"clipx.{command}"
    _command.set(redacted(shlex.join([*_program(), module, *options, *overrides])))


def repeat_command() -> str | None:
    """Returns the recorded command line, quoted for a shell. None in a process that no command of clipx started."""
    return _command.get()


def _program() -> list[str]:
    """Returns `python -m`, or under torchrun its command with the number of nodes and of processes of each."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python", "-m"]
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = [] if world == local else [f"--nnodes={world // local}"]
    return ["torchrun", *nodes, f"--nproc-per-node={local}", "-m"]


def exit_with(error: ClipxError) -> NoReturn:
    """Ends the process with the error's exit code."""
    if error.ends_abruptly:
        flush_output()
        os._exit(error.exit_code)
    sys.exit(error.exit_code)


def print_error(error: ClipxError, full: bool) -> None:
    """Prints an error on stderr; with `full` the traceback before it."""
    if full:
        print(escaped(redacted("".join(traceback.format_exception(error))), "\n"), file=sys.stderr)
    rank = rank_or_none()
    if not isinstance(error, Stopped):
        place = "" if rank is None else f" (rank {rank})"
        for number, line in enumerate(error.args):
            print_stderr(shortened(redacted(str(line) if number else f"error{place}: {line}")))
    elif not rank:  # all ranks stop together: rank 0 reports it
        print_stderr(f"stopped: {error}")
