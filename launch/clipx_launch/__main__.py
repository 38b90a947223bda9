"""Command line of `clipx-sweep COMMAND …`, also `python -m clipx_launch COMMAND …`: the commands that manage sweeps."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from clipx.cli import check_working_directory, print_error, with_output
from clipx.errors import ConfigError, Exit, known_failure
from clipx.output import lose_output
from clipx_launch import print_script
from clipx_launch.commands import logs, report, results, status, usage
from clipx_launch.commands.cancel import cancel
from clipx_launch.commands.resume import resume


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self.prog} --help lists the commands and options")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Prints an error as one line. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["script"]:  # its arguments are Hydra overrides, which argparse would refuse
        return print_script.main(words[1:])
    try:
        with with_output():
            if words[:1] == ["best"]:
                raise ConfigError(f"clipx-sweep best is now clipx-sweep {shlex.join(['status', *words[1:], '--best'])}")
            arguments = vars(parser().parse_args(words))
            check_working_directory()
            run = arguments.pop("run")
            if run in (cancel, resume):
                lose_output()  # the others print their result
            run(**arguments)
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
    """Returns the parser. It gives the function of a command as `run`, and the arguments of this function by name."""
    layout = argparse.RawDescriptionHelpFormatter
    text = "Shows, cancels, resumes and compares the runs of sweeps. COMMAND --help explains a command."
    epilog = _examples("status outputs/sweep --best", "resume outputs/sweep")
    parser = _Parser("clipx-sweep", description=text, epilog=epilog, formatter_class=layout)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., None], shared: list[_Parser], *examples: str) -> _Parser:
        """Adds a command with the `shared` arguments. `examples`: what follows `clipx-sweep`."""
        text, epilog = str(run.__doc__).partition(". ")[0], _examples(*examples)
        command = commands.add_parser(
            name, parents=shared, help=text, description=text, epilog=epilog, formatter_class=layout
        )
        command.set_defaults(run=run)
        return command

    folders, sweep, points, metric, lowest = (_Parser(add_help=False) for _ in range(5))
    text = "by default outputs"
    folders.add_argument("folders", type=Path, nargs="*", default=[Path("outputs")], metavar="FOLDER", help=text)
    folders.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")
    sweep.add_argument("sweep", type=Path, metavar="SWEEP", help="folder of the sweep, hydra.sweep.dir")
    points.add_argument("points", nargs="*", metavar="POINT", help="number or folder of a point")
    metric.add_argument(
        "--metric", help="such as eval/zeroshot/top1 (default: the first headline metric, else the loss)"
    )
    lowest.add_argument("--lowest", action="store_true", help="the lowest value is the best; a loss implies it")

    best = "status outputs/sweep --best --metric train/loss --json"
    command = add("status", status.show, [folders, metric, lowest], "status", "status outputs/sweep --watch", best)
    command.add_argument("--watch", action="store_true", help="refresh the table until all runs have ended")
    command.add_argument("--live", action="store_true", help="add MFU, use and memory of the device, and data wait")
    command.add_argument("--best", action="store_true", help="print the point of one sweep with the best --metric")

    add("usage", usage.show, [folders], "usage", "usage outputs/sweep --json")

    _add_log_options(add("logs", logs.show, [sweep, points], "logs outputs/sweep", "logs outputs/sweep 0 --lines 5"))
    command = add("cancel", cancel, [sweep, points], "cancel outputs/sweep", "cancel outputs/sweep 1 --wait 0")
    command.add_argument("--wait", type=float, default=120, metavar="S", help="seconds for running jobs to save (120)")

    add("resume", resume, [sweep], "resume outputs/sweep")
    add("results", results.write, [sweep, metric], "results outputs/sweep --metric train/loss")

    compared = "report outputs/RUN outputs/BASE --metric train/loss --out compared.html"
    _add_report_options(add("report", report.write, [lowest], "report outputs/sweep", compared))

    commands.add_parser("script", help="Prints the script of a run, to submit or start by hand: script --help")
    return parser


def _add_log_options(command: _Parser) -> None:
    command.add_argument("--rank", type=int, help="only the log of this rank")
    command.add_argument("--follow", action="store_true", help="print new lines until the points have ended")
    command.add_argument("--lines", type=int, default=30, metavar="N", help="last lines of each log (30); 0: all")


def _add_report_options(command: _Parser) -> None:
    text = "sweeps, compared together; or two or more runs, compared by the options that differ"
    command.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help=text)
    text = "such as eval/zeroshot/top1; several: their mean (default: the first headline metric)"
    command.add_argument("--metric", metavar="NAME[,NAME…]", help=text)
    text = "overrides whose values are the contenders (default: contender, objective, or the first that is no number)"
    command.add_argument("--by", metavar="KEY[,KEY…]", help=text)
    text = "numeric override of the horizontal axis (default: data.batch_size, or the first number)"
    command.add_argument("--x", metavar="KEY", help=text)
    text = "group that the others are compared with (default: the first contender)"
    command.add_argument("--baseline", metavar="KEY=VALUE[,KEY=VALUE…]", help=text)
    command.add_argument("--out", type=Path, metavar="FILE", help="the page (default: in the first FOLDER)")


def _examples(*lines: str) -> str:
    return "\n".join(["examples:", *(f"  clipx-sweep {line}" for line in lines)])


if __name__ == "__main__":
    sys.exit(main())
