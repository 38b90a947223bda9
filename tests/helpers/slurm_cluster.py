"""A real SLURM on this machine, as root: two nodes of 8 CPUs and 2 GPUs each, all daemons on loopback.

    PYTHONPATH=tests python -m helpers.slurm_cluster start FOLDER [KIND]  prints the slurm.conf for CLIPX_TEST_SLURM
    PYTHONPATH=tests python -m helpers.slurm_cluster stop FOLDER          ends its daemons and jobs, removes the folder

`helpers.debian` installs it.
A second `start` reuses a running cluster. Jobs of the partition `main` preempt those of `low`, which are requeued.

plain      squeue and scontrol work, sacct does not; a signal to a step reaches all of its processes
accounted  sacct works too, and scontrol soon forgets jobs; a preempted job first gets the signal of --signal
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from helpers import debian
from helpers.processes import free_ports

NODES = ("n1", "n2")
GPUS = 2  # per node: devices like /dev/null, which SLURM assigns to tasks like real ones
# in the order in which they are ended
_DAEMONS = (*(f"slurmd.{node}" for node in NODES), "slurmctld", "slurmdbd", "mariadbd", "munged")
_HOSTS = Path("/etc/hosts")


class Kind(StrEnum):
    plain = "plain"
    accounted = "accounted"


class Unavailable(Exception):
    """Raised if no cluster can run here; the message is the reason."""


def start(folder: Path, kind: Kind = Kind.plain) -> Path:
    """Starts a cluster. Returns its slurm.conf when all nodes accept jobs. Raises Unavailable."""
    if os.geteuid() != 0:
        raise Unavailable("only root can start it: it makes devices and names nodes in /etc/hosts")
    conf = folder / "slurm.conf"
    if not conf.exists():
        _configure(folder, kind)
    _daemon(folder, "munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed")  # fmt: skip
    _wait((folder / "munge.socket").exists, "munged", folder)
    if kind is Kind.accounted:
        _start_accounting(folder)
    _daemon(folder, "slurmctld", "-i", "-f", str(conf))
    for node in NODES:
        _daemon(folder, f"slurmd.{node}", "-N", node, "-f", str(conf))
    _wait(lambda: _idle(conf), "all nodes", folder)
    return conf


def _daemon(folder: Path, name: str, *options: str) -> None:
    if _pid(folder / f"{name}.pid") is None:
        _run(
            name.partition(".")[0],
            *options,
            MYSQL_UNIX_PORT=f"{folder}/mysql/socket",
            SLURM_CONF=f"{folder}/slurm.conf",
        )


def _start_accounting(folder: Path) -> None:
    """Starts a database without port or password in a folder of root's, and slurmdbd with the cluster registered."""
    if not (folder / "mysql").exists():
        _run("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={folder}/mysql", "--skip-test-db")
        (folder / "mysql").chmod(0o700)
    if _pid(folder / "mariadbd.pid") is None:
        with (folder / "mariadbd.log").open("ab") as log:
            subprocess.Popen(
                ["mariadbd", "--no-defaults", "--user=root", f"--datadir={folder}/mysql", "--skip-networking",
                 f"--socket={folder}/mysql/socket", f"--pid-file={folder}/mariadbd.pid", "--skip-grant-tables",
                 "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    _wait((folder / "mysql/socket").exists, "mariadbd", folder)
    conf = folder / "slurm.conf"
    _daemon(folder, "slurmdbd")
    _wait(lambda: "clipx" in _client(conf, "sacctmgr", "-i", "add", "cluster", "clipx"), "slurmdbd", folder)


def _configure(folder: Path, kind: Kind) -> None:
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
    (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
    # A job's first node is its MASTER_ADDR, so that its name must resolve.
    with _hosts() as lines:
        lines.append(_hosts_line(folder))
    port, host = free_ports(2 + len(NODES)), socket.gethostname().partition(".")[0]
    accounted = kind is Kind.accounted
    if accounted:
        _configure_accounting(folder, host, port + 3)
    (folder / "slurm.conf").write_text(f"""\
ClusterName=clipx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
# Seconds in which a daemon of a busy machine answers a command, 10 by default.
MessageTimeout=100
# Two clusters on one machine have different jobs, and so different MASTER_PORTs.
FirstJobId={1 + 100 * (port // 4 % 45)}
# A requeued job starts again only when its credentials have expired, 120 s by default.
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
KillWait=60
MinJobAge={5 if accounted else 300}
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
{_ACCOUNTED.format(folder=folder, port=port + 3) if accounted else "AccountingStorageType=accounting_storage/none"}
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1}-{port + 2} CPUs=8 RealMemory=16000 Gres=gpu:fake:{GPUS}
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 State=UP
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=20 State=UP
""")


_ACCOUNTED = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStorageTRES=gres/gpu
# Else it asks the munge of the system, whatever AuthInfo says.
AccountingStoragePass={folder}/munge.socket
SlurmctldParameters=preempt_send_user_signal"""


def _configure_accounting(folder: Path, host: str, port: int) -> None:
    path = folder / "slurmdbd.conf"
    path.touch(0o600)  # else slurmdbd does not start
    path.write_text(f"""\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
""")


def crash(folder: Path, node: str) -> None:
    """Kills the node's daemon and all jobs of this cluster, undetected for a while. `start` restarts the node."""
    conf = f"SLURM_CONF={folder}/slurm.conf".encode()
    pids = [pid for pid in (_pid(folder / f"slurmd.{node}.pid"),) if pid is not None]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has already ended
            own = (process / "environ").read_bytes().split(b"\0")
            step = (process / "comm").read_text() == "slurmstepd\n"
            of_a_job = step or any(variable.startswith(b"SLURM_JOB_ID=") for variable in own)
            pids += [int(process.name)] if conf in own and of_a_job else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stop(folder: Path) -> None:
    """Stops the cluster, jobs first, so that no step outlives its node, and removes its folder; no other folder."""
    conf = folder / "slurm.conf"
    if not conf.is_file():  # an empty word of a shell is the current folder
        return
    if _pid(folder / "slurmctld.pid") is not None:
        _client(conf, "scancel", "--user=root")
        end = time.monotonic() + 60
        while _client(conf, "squeue", "-h").strip() and time.monotonic() < end:
            time.sleep(0.1)
    for name in _DAEMONS:
        _end(folder / f"{name}.pid")
    with _hosts() as lines:
        lines[:] = [line for line in lines if line != _hosts_line(folder)]
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _hosts() -> Iterator[list[str]]:
    """Yields the lines of /etc/hosts, and writes them back in place: in a container it may be a mount.

    A lock makes other clusters wait.
    """
    with _HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        yield lines
        file.seek(0)
        file.write("\n".join(lines) + "\n")
        file.truncate()


def _hosts_line(folder: Path) -> str:
    return f"127.0.0.1 {' '.join(NODES)} # clipx tests, {folder}"


def _pid(path: Path) -> int | None:
    """Returns the process id of a running daemon from its pid file."""
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
    states = _client(conf, "sinfo", "-h", "-N", "--partition=main", "-o", "%T").split()
    return len(states) == len(NODES) and set(states) <= {"idle", "mixed", "allocated", "completing"}


def _client(conf: Path, *command: str) -> str:
    """Returns the output of a SLURM command; empty on failure, as until the controller answers."""
    env = {**os.environ, "SLURM_CONF": str(conf)}
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False).stdout
    return ""


def _run(*command: str, timeout: float = 600, **variables: str) -> None:
    """Runs a command with its output separate from ours, which may be parsed as a value. Raises Unavailable."""
    env = {**os.environ, **variables}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command)} took more than {timeout:.0f} s") from None
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed: {debian.INSTALL}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{' '.join(command)} failed: {said[-1] if said else done.returncode}")


def _wait(ready: Callable[[], bool], what: str, folder: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            lines = [line for log in folder.glob("*.log") for line in log.read_text().splitlines()[-3:]]
            raise Unavailable(f"{what} did not come up in {seconds:.0f} s: {' | '.join(lines)}")
        time.sleep(0.05)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "start":
            print(start(Path(sys.argv[2]).absolute(), *map(Kind, sys.argv[3:])))
        else:
            stop(Path(sys.argv[2]).absolute())
    except (Unavailable, OSError) as error:
        sys.exit(f"no SLURM: {error}")
