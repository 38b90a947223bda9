"""`python -m clipx.score data=… out=…`: writes a table of scores with a row for each training sample.

Runs on any number of ranks, which share the parts. A killed command continues when it is started again.
"""

from __future__ import annotations

from clipx.cli import cli, imports
from clipx.errors import ConfigError
from clipx.evaluator.spec import check_data
from clipx.extra.curate.score_spec import ScoreSpec
from clipx.weights.model_spec import UNUSED
from clipx.weights.spec import check_exists


def score(spec: ScoreSpec) -> None:
    """Writes the scores. Collective. Raises ConfigError if `out` contains scores of other options."""
    if spec.data is None:
        raise ConfigError("data has no value: give the data whose samples are scored, e.g. data=shapes")
    check_data(spec.data, {}, files=spec.distributed.check_launch().world == 1, trains=True)
    if spec.run is not None:
        check_exists(spec.run, "run")
    with imports():
        from clipx.extra.curate.writer import write_scores

    with spec.distributed.joined() as comm:
        write_scores(spec, spec.data, comm)


main = cli(score, "score", unused=("evaluator", *UNUSED))

if __name__ == "__main__":  # loader processes import this module again
    main()
