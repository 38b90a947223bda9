"""Weights & Biases, online or as files in the run directory."""

from __future__ import annotations

import os
import uuid
from dataclasses import field
from pathlib import Path
from typing import Any

from clipx.config.registry import frozen, option, register
from clipx.errors import ConfigError
from clipx.logger.spec import LoggerSpec, Row, Sink, id_file, write_id


@register("logger")
@frozen
class WandbSpec(LoggerSpec):
    """Logs to Weights & Biases. A resumed run continues the same run there."""

    kind: str = "wandb"
    """Name of this logger, selected by logger=[wandb]. The key itself cannot be set."""

    project: str = "clipx"
    """Project on Weights & Biases."""

    entity: str | None = None
    """User or team of the project on Weights & Biases. null: the default entity of the account."""

    tags: list[str] = field(default_factory=list)
    """Tags of the run on Weights & Biases. WANDB_NOTES sets its notes."""

    mode: str = option("online", choices=("online", "offline"))
    """`online`: sends metrics during the run; needs `wandb login` or WANDB_API_KEY. `offline`: writes files under
    <run>/wandb, to be sent later by `wandb sync`."""

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        import wandb

        if self.mode == "online" and not (os.environ.get("WANDB_API_KEY") or _has_netrc()):
            raise ConfigError(
                "logger.wandb.mode=online needs a key: run `wandb login`, set WANDB_API_KEY, or use "
                "logger.wandb.mode=offline"
            )
        stored = id_file(run_dir, "wandb")
        if not stored.is_file():
            write_id(run_dir, "wandb", uuid.uuid4().hex[:8])
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=name,
            id=stored.read_text().strip(),
            resume="allow",
            mode="offline" if self.mode == "offline" else "online",
            dir=str(run_dir.absolute()),  # wandb's process was perhaps started in another folder by an earlier run
            tags=self.tags or None,
            config=config,
        )
        return _Wandb(run)


def _has_netrc() -> bool:
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # noqa: PTH111  # Path.home() may raise
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()
