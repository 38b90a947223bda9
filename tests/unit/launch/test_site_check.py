"""Refusals by `sbatch --test-only`, from a stand-in for SLURM. Those of a real one: faults/test_slurm_launcher.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipx.errors import ConfigError
from clipx_launch.site_check import expected_start
from clipx_launch.slurm_spec import SlurmSpec

# A cluster of two nodes of four CPUs. The node configuration is refused with the words of SLURM 22.05.
SBATCH = r"""
script=$(cat)
wanted() { sed -n "s/^#SBATCH --$1=//p" <<< "$script"; }
if [[ $(wanted partition) == none ]]; then
  echo "sbatch: error: invalid partition specified: none" >&2
  echo "allocation failure: Invalid partition name specified" >&2
  exit 1
fi
if [[ $(wanted gres) == nosuch:1 ]]; then
  echo "sbatch: error: Invalid generic resource (gres) specification" >&2
  exit 1
fi
nodes=$(wanted nodes) cpus=$(wanted cpus-per-task)
if (( ${nodes:-1} > 2 || ${cpus:-1} > 4 )) || [[ "$script" == *--licenses=* ]]; then
  echo "allocation failure: Requested node configuration is not available" >&2
  exit 1
fi
echo "sbatch: Job 7 to start at 2026-11-30T21:30:06 using 1 processors on nodes n1 in partition main" >&2
"""
SINFO = """
case "$*" in
  *list-reasons*) echo "$DOWN" ;;
  *%R*) printf 'main\nlow\n' ;;
  *) printf 'main*|infinite\nlow|1-02:00:00\n' ;;
esac
"""


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in {"sbatch": SBATCH, "sinfo": SINFO}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("DOWN", "")


def start(folder: Path, **options: object) -> str:
    """Returns the expected start, or `refused: ` and the error."""
    spec = SlurmSpec(**{"gpus_per_node": "0", "cpus_per_task": 1, **options})  # type: ignore[arg-type]
    try:
        return expected_start(spec, folder, folder / "0")
    except ConfigError as error:
        return f"refused: {error}"


def test_the_expected_start_is_that_of_slurm(tmp_path: Path) -> None:
    assert start(tmp_path) == "2026-11-30T21:30:06 on n1, as SLURM expects"


def test_the_refused_option_is_named(tmp_path: Path) -> None:
    never = "refused: SLURM can never start this job (Requested node configuration is not available) with "
    lower = "lower or correct it, or choose another partition: sinfo --Node --long lists what each node has"
    assert start(tmp_path, nodes=3) == f"{never}hydra.launcher.nodes=3: {lower}"
    assert start(tmp_path, cpus_per_task=5, partition="low") == f"{never}hydra.launcher.cpus_per_task=5: {lower}"
    added = start(tmp_path, additional_parameters={"licenses": "a"})
    assert added == f"{never}hydra.launcher.additional_parameters.licenses=a: {lower}"
    both = start(tmp_path, nodes=3, cpus_per_task=5)
    assert both == f"{never}these options of hydra.launcher: {lower}"
    gres = start(tmp_path, gres="nosuch:1")
    never = "refused: SLURM can never start this job (Invalid generic resource (gres) specification) with "
    assert gres == f"{never}hydra.launcher.gres=nosuch:1: {lower}"
    partition = start(tmp_path, partition="none")
    assert partition == (
        "refused: SLURM can never start this job (Invalid partition name specified) with hydra.launcher.partition=none: choose "
        "one of low, main"
    )


def test_a_job_waits_for_nodes_that_are_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOWN", "broken|root|2026-11-30T21:00:00|n2")
    says = "unknown, for nodes are down or drained (Requested node configuration is not available)"
    assert start(tmp_path, nodes=3) == says
    assert "choose one of low, main" in start(tmp_path, partition="none")


def test_a_time_limit_above_the_partitions_is_refused(tmp_path: Path) -> None:
    expected = "2026-11-30T21:30:06 on n1, as SLURM expects"
    assert start(tmp_path, timeout_min=9999) == expected
    assert start(tmp_path, partition="low,main", timeout_min=9999) == expected
    assert start(tmp_path, partition="low", timeout_min=1560) == expected
    says = "refused: hydra.launcher.timeout_min=1561 is more than partition low allows: lower it to at most 1560"
    assert start(tmp_path, partition="low", timeout_min=1561) == says
