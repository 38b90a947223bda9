"""Command line of `clipx-sweep COMMAND …`, also `python -m clipx_launch COMMAND …`: the commands that manage sweeps."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from clipx.cli import check_working_directory, print_error, with_output
from clipx.errors import ConfigError, Exit, known_failure, require
from clipx.output import lose_output
from clipx_launch import print_script
from clipx_launch.commands import logs, results, status
from clipx_launch.commands.cancel import cancel
from clipx_launch.commands.resume import resume

_EXAMPLES = {
    "status": ["status", "status outputs/sweep --watch"],
    "logs": ["logs outputs/sweep", "logs outputs/sweep 0 --lines 5"],
    "cancel": ["cancel outputs/sweep", "cancel outputs/sweep 1 --wait 0"],
    "resume": ["resume outputs/sweep"],
    "best": ["best outputs/sweep", "best outputs/sweep --metric train/loss --json"],
    "results": ["results outputs/sweep --metric train/loss"],
    "report": ["report outputs/sweep", "report outputs/RUN outputs/BASE --metric train/loss --out compared.html"],
}
"""Examples that `--help` of a command shows: what follows `clipx-sweep`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self.prog} --help lists the commands and options")


_Add = Callable[..., _Parser]  # add_parser of the commands


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Prints an error as one line. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["script"]:  # its arguments are Hydra overrides, which argparse would refuse
        return print_script.main(words[1:])
    try:
        with with_output():
            arguments = parser().parse_args(words)
            check_working_directory()
            _run(arguments)
    except KeyboardInterrupt:
        return Exit.ABORTED
    except Exception as error:
        found = known_failure(error)
        if found is None:
            raise
        print_error(found, full=False)
        return found.exit_code
    return Exit.FINISHED


def parser() -> _Parser:
    parser = _Parser(
        "clipx-sweep",
        description="Shows, cancels, resumes and compares the runs of sweeps. COMMAND --help explains a command.",
        epilog=_examples(["best outputs/sweep", "resume outputs/sweep"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_subparsers(dest="command", required=True, metavar="COMMAND").add_parser
    command = _command(add, "status", "prints a table of all runs under the folders, in a sweep or not")
    command.add_argument(
        "folders", type=Path, nargs="*", default=[Path("outputs")], metavar="FOLDER", help="by default outputs"
    )
    output = command.add_mutually_exclusive_group()
    output.add_argument(
        "--watch", action="store_true", help="refresh the table every few seconds until all runs have ended"
    )
    output.add_argument("--json", action="store_true", help="print one JSON document")
    command = _sweep_command(add, "logs", "prints the logs of the given points, by default of all failed points")
    command.add_argument("points", nargs="*", metavar="POINT", help="number or folder of a point")
    command.add_argument("--rank", type=int, help="only the log of this rank")
    command.add_argument("--follow", action="store_true", help="print new lines until the points have ended")
    command.add_argument(
        "--lines", type=int, default=30, metavar="N", help="number of last lines of each log; 0: all (default 30)"
    )
    command = _sweep_command(add, "cancel", "stops points that wait or run; running points save a checkpoint")
    command.add_argument("points", nargs="*", metavar="POINT", help="number or folder of a point (default: all)")
    command.add_argument(
        "--wait", type=float, default=120, metavar="S", help="longest time in seconds for running jobs to save (120)"
    )
    _sweep_command(add, "resume", "launches again the points that ended without finishing")
    best = _sweep_command(add, "best", "prints the best point by a metric")
    table = _sweep_command(add, "results", "writes one row per point: results.csv and results.parquet")
    for command in (best, table):
        command.add_argument(
            "--metric", help="such as eval/zeroshot/top1 (default: the first headline number, else train/loss)"
        )
    best.add_argument("--lowest", action="store_true", help="the lowest value is the best; a loss implies it")
    best.add_argument("--json", action="store_true", help="print one JSON document")
    _report_command(add)
    add("script", help="prints the script of a run, to submit or start by hand: script --help")
    return parser


def _examples(lines: Sequence[str]) -> str:
    return "\n".join(["examples:", *(f"  clipx-sweep {line}" for line in lines)])


def _command(add: _Add, name: str, text: str) -> _Parser:
    layout = argparse.RawDescriptionHelpFormatter
    epilog = _examples(_EXAMPLES[name])
    return add(name, help=text, description=text, epilog=epilog, formatter_class=layout)


def _sweep_command(add: _Add, name: str, text: str) -> _Parser:
    command = _command(add, name, text)
    command.add_argument("sweep", type=Path, metavar="SWEEP", help="folder of the sweep, hydra.sweep.dir")
    return command


def _report_command(add: _Add) -> None:
    text = (
        "writes one page that compares the points of sweeps, or several runs: report.html or comparison.html, and .json"
    )
    command = _command(add, "report", text)
    command.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="sweeps, compared together; or two or more "
        "runs, compared by the options that differ"
    )  # fmt: skip
    command.add_argument(
        "--metric", metavar="NAME[,NAME…]", help="such as eval/zeroshot/top1; several: their mean (default: the first "
        "headline metric, for retrieval the mean of both directions)"
    )  # fmt: skip
    command.add_argument("--lowest", action="store_true", help="the lowest value is the best; a loss implies it")
    command.add_argument(
        "--by", metavar="KEY[,KEY…]", help="overrides whose values are the contenders, a colour each (default: "
        "contender or objective if it varies, else the first override that is no number)"
    )  # fmt: skip
    command.add_argument(
        "--x", metavar="KEY", help="numeric override of the horizontal axis (default: data.batch_size if it varies, "
        "else the first number)"
    )  # fmt: skip
    command.add_argument(
        "--baseline", metavar="KEY=VALUE[,KEY=VALUE…]", help="group that the others are compared with (default: the "
        "first contender)"
    )  # fmt: skip
    command.add_argument("--out", type=Path, metavar="FILE", help="the page (default: in the first FOLDER)")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command in ("cancel", "resume"):
        lose_output()  # the others print their result
    match arguments.command:
        case "status":
            status.show(arguments.folders, arguments.watch, arguments.json)
        case "logs":
            require(arguments.lines >= 0, f"--lines={arguments.lines} must be 0 (all) or more")
            logs.show(arguments.sweep, arguments.points, arguments.rank, arguments.lines, arguments.follow)
        case "cancel":
            require(0 <= arguments.wait < math.inf, f"--wait={arguments.wait} must be 0 s or more: the default is 120")
            cancel(arguments.sweep, arguments.points, arguments.wait)
        case "resume":
            resume(arguments.sweep)
        case "best":
            results.print_best(arguments.sweep, arguments.metric, arguments.lowest, arguments.json)
        case "report":
            from clipx_launch.commands.report import write  # imported late: of no other command

            a = arguments
            write(a.folders, a.metric, a.lowest, a.by, a.x, a.baseline, a.out)
        case _:
            results.write(arguments.sweep, arguments.metric)


if __name__ == "__main__":
    sys.exit(main())
