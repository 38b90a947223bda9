"""`python -m clipx.train`: composes, checks and trains a run."""

from __future__ import annotations

from clipx.cli import cli
from clipx.errors import NotSynced, Stopped
from clipx.trainer.spec import RunSpec


def train(spec: RunSpec) -> float | None:
    """Trains a run. Returns its first headline metric for a sweeper to maximize; None if there is none."""
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


main = cli(train, "train")

if __name__ == "__main__":
    main()
