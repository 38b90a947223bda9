"""The SLURM cluster of the tests: nodes and devices of its tasks, and complete removal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from helpers import slurm_cluster
from helpers.slurm_cluster import GPUS, NODES


def test_tasks_have_nodes_names_and_devices_as_on_a_real_cluster(slurm: Path) -> None:
    script = 'echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(getent hosts "$SLURMD_NODENAME")'
    command = ("srun", f"--nodes={len(NODES)}", f"--ntasks-per-node={GPUS}", "--gpus-per-task=1", "bash", "-c", script)
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    tasks = sorted(line.split()[:4] for line in out.splitlines())
    assert tasks == [
        [node, str(GPUS * n + k), str(k), "127.0.0.1"] for n, node in enumerate(NODES) for k in range(GPUS)
    ]


def test_a_second_start_reuses_the_cluster_and_stop_leaves_nothing(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    try:
        conf = slurm_cluster.start(folder)
        pids = {path.name: path.read_text() for path in folder.glob("*.pid")}
        assert len(pids) == 2 + len(NODES)
        assert str(folder) in Path("/etc/hosts").read_text()
        assert slurm_cluster.start(folder) == conf
        assert {path.name: path.read_text() for path in folder.glob("*.pid")} == pids
        subprocess.run(
            ["sbatch", "--wrap", "sleep 60"], env={**os.environ, "SLURM_CONF": str(conf)}, check=True, cwd=tmp_path
        )
    finally:
        slurm_cluster.stop(folder)
    assert not folder.exists()
    assert str(folder) not in Path("/etc/hosts").read_text()
    assert not [pid for pid in pids.values() if str(folder) in _command(int(pid))]


def test_stop_removes_no_folder_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    slurm_cluster.stop(tmp_path)
    assert (tmp_path / "file").is_file()


def _command(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""
