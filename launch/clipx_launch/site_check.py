"""Asks SLURM whether it can run a job, by `sbatch --test-only`, and names the options for which it cannot."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from clipx.compat import submission_text
from clipx.errors import ConfigError, require
from clipx_launch import cluster
from clipx_launch.sbatch_script import executor_of
from clipx_launch.slurm_spec import KEYS, SlurmSpec

_START = re.compile(r"to start at (\S+) using .* on nodes? (\S+) in partition")
_PREFIXES = re.compile(r"^(?:(?:sbatch|allocation failure|error|fatal): )+")


def expected_start(spec: SlurmSpec, sweep: Path, point: Path) -> str:
    """Returns when and where SLURM expects a point to start. Raises ConfigError if no node can ever run it."""
    require(
        shutil.which("sbatch") is not None,
        "hydra/launcher=clipx_slurm needs sbatch, which is not on PATH: launch on a SLURM host, or use clipx_local",
    )
    executor = executor_of(spec, sweep, {0: point})
    with cluster.outside_job(spec):
        ok, answer = _test(executor, executor.parameters)
        if not ok and not _may_be_temporary(spec, answer):
            raise ConfigError(_refusal(spec, executor, answer))
    limit = cluster.time_limit(spec.partition)
    require(  # --test-only accepts it, and the job would wait for ever
        limit is None or spec.timeout_min <= limit,
        f"hydra.launcher.timeout_min={spec.timeout_min} is more than partition {spec.partition or '(default)'} allows: "
        f"lower it to at most {limit}",
    )
    if found := _START.search(answer):
        return f"{found[1]} on {found[2]}, as SLURM expects"
    return f"unknown, for nodes are down or drained ({answer})"


def _test(executor: SlurmExecutor, parameters: dict[str, Any]) -> tuple[bool, str]:
    """Returns whether SLURM accepts a job with these parameters, and the last line of its answer, the reason."""
    job = copy.copy(executor)
    job.parameters = parameters
    done = cluster.slurm_process("sbatch", "--test-only", text=submission_text(job, "exit", ""))
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no answer"]
    return done.returncode == 0, _PREFIXES.sub("", lines[-1])


def _may_be_temporary(spec: SlurmSpec, answer: str) -> bool:
    """Returns whether SLURM may refuse a job for nodes that are down or drained: sbatch would queue it."""
    of_partition = [f"--partition={spec.partition}"] if spec.partition else []
    return "node configuration" in answer and bool(
        cluster.run_slurm("sinfo", "--noheader", "--list-reasons", *of_partition)
    )


def _refusal(spec: SlurmSpec, executor: SlurmExecutor, answer: str) -> str:
    """Returns the error of a refused job: it names the options without one of which SLURM accepts the job."""
    variants = _variants(spec, executor.parameters)
    causes = {key: value for key, value, others in variants if _test(executor, others)[0]}
    if len(causes) > 1:
        causes.pop("partition", None)
    named = " or ".join(f"hydra.launcher.{key}={value}" for key, value in causes.items())
    fix = "lower or correct it, or choose another partition: sinfo --Node --long lists what each node has"
    if list(causes) == ["partition"]:
        known = cluster.run_slurm("sinfo", "--noheader", "--format=%R").splitlines()
        fix = f"choose one of {', '.join(sorted(known))}"
    return f"SLURM can never start this job ({answer}) with {named or 'these options of hydra.launcher'}: {fix}"


def _variants(spec: SlurmSpec, given: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields each option of a job: its key, its value and the parameters without it."""
    for option, key in KEYS.items():
        if key and (name := option.replace("-", "_")) in given:
            yield key, getattr(spec, key) or given[name], _without(given, name)
    for name, value in spec.additional_parameters.items():
        others = _without(given["additional_parameters"], name)
        yield f"additional_parameters.{name}", value, {**given, "additional_parameters": others}


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
