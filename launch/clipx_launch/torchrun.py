"""Prints the torchrun script of one run on several hosts without SLURM."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hydra.core.utils import JobReturn

from clipx.commands import module_of
from clipx.config import plugins
from clipx_launch.options import TorchrunSpec
from clipx_launch.sbatch_script import exports
from clipx_launch.sweep import Sweep

_SCRIPT = """\
#!/bin/bash
# Run on each of {nodes} hosts: bash SCRIPT NUMBER, where {host} has number 0. The same commands again resume the run.
set -eu
{environment}
{passed}cd {folder}
exec {python} -m torch.distributed.run --nnodes={nodes} --node-rank="${{1:?the number of this host, from 0}}" \\
  --nproc-per-node={tasks} --master-addr={host} --master-port={port} \\
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \\
  -m {module} {words}
"""


def launch(sweep: Sweep, spec: TorchrunSpec) -> list[JobReturn]:
    """Prints the script and writes nothing. Raises ConfigError if the run is not valid.

    All hosts use the same run directory, and a second start resumes the run there.
    """
    sweep.check(spec)
    point = sweep.planned[0].point
    typed_keys = {word.partition("=")[0] for word in point.overrides}
    added = {"run_dir": str(point.folder), "resume": "auto"} if point.trains else {}
    words = [word for folder in plugins.__path__ for word in ("--config-dir", str(folder))]
    words += [*point.overrides, *(f"{key}={value}" for key, value in added.items() if key not in typed_keys)]
    script = _SCRIPT.format(
        nodes=spec.nodes,
        host=spec.host,
        port=spec.port,
        tasks=spec.tasks_per_node,
        environment=exports({"PYTHONUNBUFFERED": "1", **spec.environment}),
        passed="".join(f': "${{{name}:?export it on this host}}"\n' for name in spec.pass_environment),
        folder=shlex.quote(str(Path.cwd())),
        python=spec.python or shlex.quote(sys.executable),
        module=module_of(point.command),
        words=shlex.join(words),
    )
    print(script, end="")
    return sweep.job_returns(ended=False)
