"""`python -m clipx.bench <name> [key=value …]`: runs a benchmark and publishes its results. Without a name: lists the
benchmarks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial

from clipx.bench.spec import BenchSpec
from clipx.bench.step import gathered
from clipx.cli import cli, with_output
from clipx.config.registry import CONF_DIR
from clipx.escape import print_stderr
from clipx.output import open_output

_OVERVIEW = """\
clipx runs a benchmark, prints its results and writes them into a folder: python -m clipx.bench NAME [KEY=VALUE …]

python -m clipx.bench loss # about three minutes on two CPU cores
python -m clipx.bench step model=vit_b32 batch=8
python -m clipx.bench loss --help # the keys of a benchmark

Benchmarks:

{benchmarks}"""


def bench(words: Sequence[str], spec: BenchSpec) -> None:
    """Runs a benchmark and publishes its results. `words` are the arguments of the command line."""
    from clipx.bench.publish import check, publish
    from clipx.report.console import stdout_console

    command = ["python", "-m", "clipx.bench", spec.kind]
    command += [word for word in words if word not in (spec.kind, f"bench={spec.kind}")]
    check(spec)
    console = stdout_console()
    publish(spec, spec.run(lambda text: console.print(text)), command, console)


def names() -> list[str]:
    """Returns the names of the benchmarks."""
    return sorted(path.stem for path in (CONF_DIR / "bench").glob("*.yaml"))


def overview() -> str:
    """Returns the usage and the list of benchmarks, each with the first line of its module's docstring."""
    about = {name: (importlib.import_module(f"clipx.bench.{name}").__doc__ or "").splitlines()[0] for name in names()}
    lines = [f"  {name:<14}{text}" for name, text in about.items()]
    return _OVERVIEW.format(benchmarks="\n".join(lines))


def main() -> None:
    """Moves the benchmark's name to the end of the command line, and runs Hydra's main."""
    open_output()
    words = sys.argv[1:]
    if words in ([], ["--help"], ["-h"]):
        with with_output():
            print(overview())
        return
    if "=" in words[0] and not words[0].startswith("bench="):
        print_stderr(f"error: {words[0]} is not a benchmark: name one of {', '.join(names())} first")
        sys.exit(2)
    if "=" not in words[0] and not words[0].startswith("-"):
        rest = gathered(words[1:]) if words[0] == "step" else words[1:]
        sys.argv[1:] = [*rest, f"bench={words[0]}"]  # at the end, for -m must precede all overrides
    cli(partial(bench, words), "bench")()


if __name__ == "__main__":
    main()
