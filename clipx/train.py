"""`python -m clipx.train`: compose, check, train."""

from __future__ import annotations

from clipx.cli import cli
from clipx.errors import NotSynced, Stopped
from clipx.trainer.spec import RunSpec


def train(spec: RunSpec) -> float | None:
    """Returns the held-out score that a sweeper maximises, where there is one."""
    from clipx.report.console import is_headline
    from clipx.trainer.trainer import Trainer  # torch is loaded when the configuration is known to be good

    trainer = Trainer(spec)
    try:
        final = trainer.fit()
    except (Stopped, NotSynced):  # all ranks are here; after another error they may be waiting, and closing would wait
        trainer.comm.close()
        raise
    trainer.comm.close()
    return next((value for name, value in final.items() if is_headline(name)), None)


main = cli(train, "train")

if __name__ == "__main__":
    main()
