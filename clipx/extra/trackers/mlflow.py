"""MLflow: an SQLite file in the run directory, or any other tracking store."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.config.registry import frozen, option, register
from clipx.config.saved import flatten
from clipx.errors import ConfigError
from clipx.logger.spec import LoggerSpec, Row, Sink, check_name, id_file, require_package, write_id
from clipx.storage.url import check_secrets

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

_PARAMS_PER_REQUEST = 100  # MLflow's limits
_PARAM_CHARACTERS = 6000


@register("logger")
@frozen
class MlflowSpec(LoggerSpec):
    """Logs to MLflow, by default into <run>/mlflow.db. A resumed run continues the same run there."""

    kind: str = "mlflow"
    """Name of this logger, selected by logger=[mlflow]. The key itself cannot be set."""

    tracking_uri: str | None = option(None, check=check_secrets)
    """Tracking store: sqlite:////absolute/path.db, or the URL of a server, http://host:5000, whose user and password
    are read from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. null: an SQLite file of the run,
    <run>/mlflow.db, which needs no server."""

    experiment: str = option("clipx", check=check_name)
    """Experiment in MLflow that contains the run; created if there is none."""

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        require_package("mlflow", "mlflow")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # these are read when mlflow is imported
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        own = run_dir / "mlflow.db"
        stored = id_file(run_dir, "mlflow")
        known = stored.is_file()
        if known and self.tracking_uri is None and not own.is_file():  # resumed from a URL, which lacks the file
            log.info("%s is missing, which contains the run of %s: a new run begins in MLflow", own, stored.name)
            known = False
        client = MlflowClient(self.tracking_uri or f"sqlite:///{own.absolute()}")
        if not known:
            experiment = client.get_experiment_by_name(self.experiment)
            number = experiment.experiment_id if experiment else client.create_experiment(self.experiment)
            tags = {"mlflow.source.name": "clipx.train", "run_dir": str(run_dir)}
            write_id(run_dir, "mlflow", client.create_run(number, run_name=name, tags=tags).info.run_id)
        sink = _Mlflow(client, stored.read_text().strip())
        try:
            sink.open(config)
        except MlflowException as error:
            message = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"logger.mlflow.tracking_uri={self.tracking_uri or 'null'} cannot continue the run named in {stored} "
                f"({message}): give the store that contains the run, or remove the file to begin a new one"
            ) from None
        return sink


def mlflow_name(name: str) -> str:
    """Returns the name of a metric or key in MLflow, which permits letters, digits and `_-. :/` only.

    @ becomes _at_, as in recall_at_1; other characters become _.
    """
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


class _Mlflow:
    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._id = client, run_id
        self._last: dict[str, int] = {}  # newest step of a metric in the store
        self._resumed = False

    def open(self, config: dict[str, Any]) -> None:
        """Stores the configuration as parameters. Those of a resumed run cannot change: changed values become tags."""
        stored = self._client.get_run(self._id)
        self._resumed = bool(stored.data.params)
        self._client.update_run(self._id, status="RUNNING")
        values = {mlflow_name(key): str(value)[:_PARAM_CHARACTERS] for key, value in flatten(config)}
        changed = {key: text for key, text in values.items() if stored.data.params.get(key, text) != text}
        self._store([(key, text) for key, text in values.items() if key not in stored.data.params])
        for key, text in changed.items():
            self._client.set_tag(self._id, f"resumed/{key}", text)

    def _store(self, params: list[tuple[str, str]]) -> None:
        from mlflow.entities import Param

        for first in range(0, len(params), _PARAMS_PER_REQUEST):
            batch = [Param(key, text) for key, text in params[first : first + _PARAMS_PER_REQUEST]]
            self._client.log_batch(self._id, params=batch)

    def log(self, row: Row) -> None:
        from mlflow.entities import Metric

        step, now = int(row["step"]), int(time.time() * 1000)
        values = {mlflow_name(name): float(value) for name, value in row.items() if name != "step"}
        new = [Metric(name, value, now, step) for name, value in values.items() if step > self._newest(name)]
        self._client.log_batch(self._id, metrics=new)
        self._last.update({metric.key: step for metric in new})

    def _newest(self, name: str) -> int:
        """Returns the newest step of a metric in the store: a resumed run repeats steps that are logged already."""
        if name not in self._last:
            history = self._client.get_metric_history(self._id, name) if self._resumed else []
            self._last[name] = max((metric.step for metric in history), default=-1)
        return self._last[name]

    def close(self) -> None:
        self._client.set_terminated(self._id)
