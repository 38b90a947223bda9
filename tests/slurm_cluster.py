"""A real SLURM on this machine, as root: two nodes of 8 CPUs and 2 GPUs each, all daemons on loopback.

    python tests/slurm_cluster.py install          what Debian's packages have, where it is missing
    python tests/slurm_cluster.py start FOLDER     prints the slurm.conf, which CLIPX_TEST_SLURM is to name
    python tests/slurm_cluster.py stop FOLDER      ends what runs in it, and removes the folder

A second `start` finds what runs. There is no accounting: `squeue` and `scontrol show job` answer, `sacct` does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from s3server import free_ports

NODES = ("n1", "n2")
GPUS = 2  # of each node: devices like /dev/null, of which SLURM tells a task as it does of real ones
_PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
_HOSTS = Path("/etc/hosts")
_NO_START = Path("/usr/sbin/policy-rc.d")


class Unavailable(Exception):
    """There can be no cluster here; the message is the reason."""


def install() -> None:
    """Debian's packages, whose own services are not started. Raises Unavailable."""
    missing = sorted(package for program, package in _PACKAGES.items() if shutil.which(program) is None)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(missing)} are not installed, which takes root and Debian's apt-get")
    with _services_stopped():
        _run("apt-get", "update", "-qq", timeout=120)
        _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, timeout=300)


@contextlib.contextmanager
def _services_stopped() -> Iterator[None]:
    """Debian asks this program whether a new package may start its service; 101 is no."""
    if _NO_START.exists():
        yield
        return
    _NO_START.write_text("#!/bin/sh\nexit 101\n")
    _NO_START.chmod(0o755)
    try:
        yield
    finally:
        _NO_START.unlink()


def start(folder: Path) -> Path:
    """Its slurm.conf, when all nodes take jobs. Raises Unavailable."""
    if os.geteuid() != 0:
        raise Unavailable("only root can start it: it makes devices and names nodes in /etc/hosts")
    conf, socket_path = folder / "slurm.conf", folder / "munge.socket"
    if not conf.exists():
        _configure(folder)
    daemons = {
        "munged": ("munged", "--force", f"--key-file={folder}/munge.key", f"--socket={socket_path}",
                   f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
                   f"--seed-file={folder}/munge.seed"),
        "slurmctld": ("slurmctld", "-i", "-f", str(conf)),
        **{f"slurmd.{node}": ("slurmd", "-N", node, "-f", str(conf)) for node in NODES},
    }  # fmt: skip
    for name, command in daemons.items():
        if _pid(folder / f"{name}.pid") is None:
            _run(*command)
        if name == "munged":
            _wait(socket_path.exists, "munged", folder)
    _wait(lambda: _idle(conf), "all nodes", folder)
    return conf


def _configure(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", *NODES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    devices = [folder / f"gpu{k}" for k in range(GPUS)]
    for device in devices:  # a character device, or tasks get no CUDA_VISIBLE_DEVICES
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu Type=fake File={folder}/gpu[0-{GPUS - 1}]\n")
    # A job's first node is its MASTER_ADDR, so that its name has to lead somewhere.
    _HOSTS.write_text(f"{_HOSTS.read_text().rstrip()}\n{_hosts_line(folder)}\n")
    port, host = free_ports(1 + len(NODES)), socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(f"""\
ClusterName=clipx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
# A requeued job starts again only when its credentials have expired, 120 s by default.
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# More CPUs than the machine may have.
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1}-{port + 2} CPUs=8 Gres=gpu:fake:{GPUS}
PartitionName=main Nodes=ALL Default=YES State=UP
""")


def stop(folder: Path) -> None:
    """Jobs first, so that no step outlives its node."""
    conf = folder / "slurm.conf"
    if _pid(folder / "slurmctld.pid") is not None:
        _client(conf, "scancel", "--user=root")
        end = time.monotonic() + 20
        while _client(conf, "squeue", "-h").strip() and time.monotonic() < end:
            time.sleep(0.1)
    for name in (*(f"slurmd.{node}" for node in NODES), "slurmctld", "munged"):
        _end(folder / f"{name}.pid")
    if _hosts_line(folder) in (lines := _HOSTS.read_text().splitlines()):
        lines.remove(_hosts_line(folder))
        _HOSTS.write_text("\n".join(lines) + "\n")  # in place: in a container it may be a mount
    shutil.rmtree(folder, ignore_errors=True)


def _hosts_line(folder: Path) -> str:
    return f"127.0.0.1 {' '.join(NODES)} # clipx tests, {folder}"


def _pid(path: Path) -> int | None:
    """Of a daemon that runs, by its file."""
    try:
        pid = int(path.read_text())
        command, state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[::2]
    except (OSError, ValueError):
        return None
    return pid if command.endswith(f"({path.name.partition('.')[0]}") and state.split()[0] not in "ZX" else None


def _end(path: Path) -> None:
    for signal_number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        end = time.monotonic() + seconds
        if (pid := _pid(path)) is not None:
            os.kill(pid, signal_number)
        while _pid(path) is not None and time.monotonic() < end:
            time.sleep(0.02)


def _idle(conf: Path) -> bool:
    states = _client(conf, "sinfo", "-h", "-N", "-o", "%T").split()
    return len(states) == len(NODES) and set(states) <= {"idle", "mixed", "allocated", "completing"}


def _client(conf: Path, *command: str) -> str:
    """What it prints; nothing where it fails, as it does until the controller answers."""
    env = {**os.environ, "SLURM_CONF": str(conf)}
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=10, check=False).stdout
    return ""


def _run(*command: str, timeout: float = 30) -> None:
    """Its output goes nowhere near ours, which may be read as a value. Raises Unavailable."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command)} took more than {timeout:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{' '.join(command)} failed: {said[-1] if said else done.returncode}")


def _wait(ready: Callable[[], bool], what: str, folder: Path, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            lines = [line for log in folder.glob("*.log") for line in log.read_text().splitlines()[-3:]]
            raise Unavailable(f"{what} did not come up in {seconds:.0f} s: {' | '.join(lines)}")
        time.sleep(0.05)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "install":
            install()
        elif sys.argv[1] == "start":
            print(start(Path(sys.argv[2]).absolute()))
        else:
            stop(Path(sys.argv[2]).absolute())
    except (Unavailable, OSError) as error:
        sys.exit(f"no SLURM: {error}")
