"""Publishes the results of a benchmark: tables on the terminal, results.json, and a last line of JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.bench.spec import BenchSpec, Findings
from clipx.config.saved import to_dict
from clipx.distributed.launch_env import cores
from clipx.errors import ConfigError, require
from clipx.report.console import text_table
from clipx.storage.local import write_text
from clipx.version import __version__

if TYPE_CHECKING:
    from rich.console import Console


def check(spec: BenchSpec) -> None:
    """Raises ConfigError if the benchmark cannot run on this machine, before anything is measured."""
    require(
        "RANK" not in os.environ,
        f"RANK={os.environ.get('RANK')} is set, but a benchmark starts its processes itself: run it without torchrun",
    )
    try:
        version("open_clip_torch")
    except PackageNotFoundError as error:
        raise ConfigError("benchmarks need open_clip, which is not installed: pip install 'clipx[bench]'") from error
    results = Path(spec.run_dir) / "results.json"
    require(
        spec.resumable or not results.exists(),
        f"run_dir={spec.run_dir} already contains results: give another, or remove it",
    )


def publish(spec: BenchSpec, found: Findings, command: Sequence[str], console: Console) -> None:
    """Writes the folder, prints the tables, and prints the figures as the last line."""
    folder = Path(spec.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"benchmark": spec.kind, **found.figures, "results": spec.run_dir}
    results = {
        "figures": figures,
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "configuration": to_dict(spec),
        "details": found.details,
    }
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    for table in found.tables:
        console.print(text_table(table.columns, table.rows, table.title, right=table.columns[1:]))
    console.print(f"written to {folder}")
    print(json.dumps(figures), flush=True)


def machine() -> dict[str, Any]:
    """Returns the processor, the number of cores, the GPUs and the system."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": _cpu(), "cores": cores(), "gpus": gpus, "system": platform.platform()}


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch, open_clip and clipx, which need not be installed: a checkout will do."""
    found = {"torch": version("torch"), "open_clip": version("open_clip_torch"), "clipx": __version__}
    return {"python": platform.python_version(), **found}


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
