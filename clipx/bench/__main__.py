"""`python -m clipx.bench <name> [key=value …]`: compose, check, measure, publish. Without a name it lists them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial

from clipx.bench.spec import BenchSpec
from clipx.bench.step import gathered
from clipx.cli import cli
from clipx.config.registry import CONF_DIR


def bench(words: Sequence[str], spec: BenchSpec) -> None:
    """`words` are what was typed."""
    from clipx.bench.publish import check, publish
    from clipx.report.console import stdout_console

    command = ["python", "-m", "clipx.bench", spec.kind]
    command += [word for word in words if word not in (spec.kind, _named(spec.kind))]
    check(spec)
    console = stdout_console()
    publish(spec, spec.run(lambda text: console.print(text, markup=False)), command, console)


def names() -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / "bench").glob("*.yaml"))


def overview() -> str:
    """The benchmarks and what each measures: the first line of its module."""
    about = {name: (importlib.import_module(f"clipx.bench.{name}").__doc__ or "").splitlines()[0] for name in names()}
    lines = [f"  {name:<14}{text}" for name, text in about.items()]
    usage = "python -m clipx.bench NAME [KEY=VALUE …]"
    return "\n".join([usage, "", *lines, "", "NAME --help shows a benchmark's keys and their values."])


def _named(name: str) -> str:
    return f"bench={name}"


def main() -> None:
    words = sys.argv[1:]
    if words in ([], ["--help"], ["-h"]):
        print(overview())
        return
    if "=" in words[0] and not words[0].startswith(_named("")):
        print(f"error: {words[0]} is not a benchmark: name one of {', '.join(names())} first", file=sys.stderr)
        sys.exit(2)
    if "=" not in words[0] and not words[0].startswith("-"):
        own = gathered(words[1:]) if words[0] == "step" else words[1:]
        sys.argv[1:] = [*own, _named(words[0])]  # last, for -m must stand before all overrides
    cli(partial(bench, words), "bench")()


if __name__ == "__main__":
    main()
