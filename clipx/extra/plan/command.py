"""`python -m clipx.plan [key=value …]`: predicts what a run needs. Trains and allocates nothing."""

from __future__ import annotations

import json
import sys

from clipx.cli import cli, imports
from clipx.extra.plan.spec import PlanSpec
from clipx.trainer.continued import composition_base


def show(spec: PlanSpec) -> None:
    """Computes the plan and prints it as tables or JSON."""
    with imports():
        from clipx.extra.plan import published
        from clipx.extra.plan.estimate import plan
        from clipx.extra.plan.show import as_dict, tables
        from clipx.report.console import stdout_console

    console = stdout_console(quiet=spec.json)

    def log(text: str) -> None:
        console.print(text)

    if spec.published:
        found = published.plans(spec, log)
        console.print(published.table(found))
        result: object = [published.as_dict(setting, one) for setting, one in found]
    else:
        one = plan(spec, log)
        for table in tables(one):
            console.print(table)
        result = as_dict(one)
    if spec.json:
        print(json.dumps(result))


def main() -> None:
    """Runs Hydra's main. A key may have the name of the command before it: plan.measured=FILE."""
    sys.argv[1:] = [word.removeprefix("plan.") for word in sys.argv[1:]]
    cli(show, "plan", base=composition_base, prints=True)()


if __name__ == "__main__":
    main()
