"""`python -m clipx.look data=…`: writes an HTML page about a data set as training reads it."""

from __future__ import annotations

from pathlib import Path

from clipx.cli import cli, imports
from clipx.data.spec import exchange_captions, open_data
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.errors import ConfigError
from clipx.escape import print_stderr
from clipx.extra.look.spec import LookSpec
from clipx.storage.local import ensure_folder, write_text


def look(spec: LookSpec) -> None:
    """Reads the samples, writes the page, and prints a summary and the findings."""
    if spec.data is None:
        raise ConfigError("data has no value: give the data to look at, e.g. data=shapes")
    spec.data.check_complete()
    spec.data.check_files()
    path = Path(spec.out).expanduser()
    ensure_folder(path.parent, f"the folder of out={spec.out}", "give out in")
    warn_of_few_cores("data.workers", spec.data.loader_processes())
    with imports():
        from clipx.extra.look.page import LookPage
        from clipx.report.console import stdout_console, text_table

    found = LookPage(spec, exchange_captions(open_data(spec.data), spec.data, spec.seed))
    fix = "make room, or give another file with out=…"
    write_text(path, found.html, fix)
    console = stdout_console()
    console.print(text_table(("", "number", "share"), found.rows, found.title, right=("number", "share")))
    for what, fix in found.findings:
        print_stderr(f"warning: {what}: {fix}")
    console.print(f"written to {spec.out}")


main = cli(look, "look", unused=LookSpec.unused)

if __name__ == "__main__":  # loader processes import this module again
    main()
