"""`python -m clipx.look data=…`: writes an HTML page about a data set as training reads it."""

from __future__ import annotations

from pathlib import Path

from clipx.cli import cli, imports
from clipx.command_spec import UNUSED, DataGroupsSpec, check_no_weights, given_data
from clipx.config.registry import MISSING, frozen, option, register
from clipx.data.spec import check_effect, exchange_captions, open_data
from clipx.distributed.launch_env import warn_of_few_cores
from clipx.escape import print_stderr
from clipx.model.spec import ModelSpec
from clipx.storage.local import ensure_folder, write_text
from clipx.storage.url import check_file


@register("")
@frozen
class LookSpec(DataGroupsSpec):
    """`python -m clipx.look`: writes an HTML page about a data set as training reads it."""

    kind: str = "look"
    """Kind of the command's configuration. Fixed."""

    model: ModelSpec = MISSING
    """Model whose image size, tokenizer and context length are used. It must read images. No weights are loaded."""

    seed: int = option(0, ge=0)
    """Seed of the order, crops and captions. With the seed of a run, the page shows the first samples of that run."""

    samples: int = option(2000, ge=1)
    """Number of training samples for the statistics: those that training with `seed` reads first. Less if the data has
    fewer. About 300 bytes of memory each, and 250 for each caption."""

    out: str = option("look.html", check=check_file(".html"))
    """HTML file to write. An existing file is replaced."""

    def __post_init__(self) -> None:
        check_effect(self.data, ("micro_batches", "captions_per_step"), "the samples")
        check_effect(self.data, ("decode",), "the samples, which are read on the CPU")
        fix = "choose a model of square images, such as model=tiny, and data with images"
        self.model.image.kind.check_squares_for("this page, which shows what a model reads", fix)
        check_no_weights(self.model, "on the samples")


def look(spec: LookSpec) -> None:
    """Reads the samples, writes the page, and prints a summary and the findings."""
    data = given_data(spec.data)
    data.check_complete()
    data.check_files()
    path = Path(spec.out).expanduser()
    ensure_folder(path.parent, f"the folder of out={spec.out}", "give out in")
    warn_of_few_cores("data.workers", data.loader_processes())
    with imports():
        from clipx.extra.look.page import LookPage
        from clipx.report.console import stdout_console, text_table

    found = LookPage(spec, data, exchange_captions(open_data(data), data, spec.seed))
    fix = "make room, or give another file with out=…"
    write_text(path, found.html, fix)
    console = stdout_console()
    console.print(text_table(("", "number", "share"), found.rows, found.title, right=("number", "share")))
    for what, fix in found.findings:
        print_stderr(f"warning: {what}: {fix}")
    console.print(f"written to {spec.out}")


main = cli(look, "look", unused=UNUSED)

if __name__ == "__main__":  # loader processes import this module again
    main()
