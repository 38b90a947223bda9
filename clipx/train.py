"""`python -m clipx.train`: composes, checks and trains a run.

Signals are handled before the other packages are imported, which takes seconds, on a busy file system minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipx.output import open_output
from clipx.run.signals import StartSignals, begin_run
from clipx.run.watchdog import watch_launcher

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec


def train(spec: RunSpec) -> float | None:
    """Trains a run. Returns its first headline metric for a sweeper to maximize; None if there is none."""
    from clipx.cli import imports
    from clipx.errors import NotSynced, Stopped
    from clipx.trainer.start import check_start

    begin_run()
    check_start(spec)  # before torch is imported

    with imports():
        from clipx.report.console import is_headline
        from clipx.trainer.trainer import Trainer  # loads torch, after the configuration is checked

    trainer = Trainer(spec)
    try:
        final = trainer.fit()
    except (Stopped, NotSynced):  # on all ranks; after other errors a rank may be blocked, and closing would block
        trainer.comm.close()
        raise
    trainer.comm.close()
    return next((value for name, value in final.items() if is_headline(name)), None)


def main() -> None:
    """Entry point of the command."""
    open_output()
    StartSignals().run(_main)


def _main() -> None:
    watch_launcher()
    import clipx.trainer.spec  # noqa: F401  # registers RunSpec
    from clipx.cli import cli
    from clipx.trainer.continued import composition_base

    cli(train, "train", base=composition_base)()


if __name__ == "__main__":
    main()
