"""Rendezvous through a TCPStore. Rank 0 waits for all ranks and reports the missing ones by host."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from clipx.distributed.consistency import describe_mismatch, digest, format_names, format_ranks, format_ranks_with_hosts
from clipx.distributed.heartbeat import Heartbeats, call_with_timeout
from clipx.distributed.launch_env import LaunchEnv, node_name, usable_cores
from clipx.errors import ClipxError, ConfigError, PeerLost

log = logging.getLogger(__name__)

_POLL_S = 0.05  # between two counts of the ranks that have arrived; only rank 0 counts
_CONNECT_S = 1.0  # grace for torch to abort a connection attempt after its timeout
_LOG_AFTER_S = 30.0  # rank 0 first logs the missing ranks after this time, and then every 10 times this time
_EXIT_WAIT_S = 5.0  # rank 0 waits this long for the other ranks to read an error: the store ends with rank 0
_VERDICT_S = 30.0  # for the comparison of facts, on top of the wait for all ranks: rank 0 may arrive last
_rendezvous_numbers = itertools.count()  # sweep points in one process repeat the rendezvous, maybe at the same store
# A rank that is faster than rank 0 may begin the next rendezvous at the store of the last one, which must not end then.
_served: list[Store] = []
_ERRORS: dict[str, type[ClipxError]] = {error.__name__: error for error in (PeerLost, ConfigError)}


def rendezvous(
    launch: LaunchEnv, facts: Mapping[str, str], wait_s: float, gpu: str | None = None
) -> tuple[Store, int, Heartbeats]:
    """Waits until all ranks have joined the store. Collective.

    Returns the store, the number of ranks that share this rank's cores, and the heartbeats, which have begun.

    `facts` must be equal on all ranks, except those whose name ends in `?`: for these rank 0 logs a warning. `gpu`: id
    of this rank's device, which no other rank of a host may have.

    Raises PeerLost if rank 0 does not answer (names its host and port), or if others do not join within `wait_s`
    seconds (names them, unlike the barriers of torch); ConfigError if facts differ, ranks share a device, or the port
    cannot be bound.
    """
    store = PrefixStore(f"clipx/{launch.job}/{next(_rendezvous_numbers)}", _connect(launch, wait_s))
    try:
        heartbeats = _check_in(store, launch, facts, gpu)
        if launch.rank == 0:
            error: ClipxError | None = _wait_for_all(store, launch, wait_s) or _compare_facts(store, launch)
            store.set("verdict", json.dumps([type(error).__name__, str(error)] if error else None))
        else:
            store.wait(["verdict"], timedelta(seconds=wait_s + _VERDICT_S))
            verdict = json.loads(store.get("verdict"))
            error = _ERRORS[verdict[0]](verdict[1]) if verdict else None
        sharing = store.add(_cores_key(), 0)
        store.add("read", 1)
    except RuntimeError as lost:
        raise PeerLost(
            f"rank 0 at {launch.endpoint} ended, or did not complete the rendezvous, while rank {launch.rank} (host "
            f"{node_name()}) waited for it: check the output of rank 0"
        ) from lost
    if error:
        wait_until_read(store, launch)
        raise error
    heartbeats.start()
    return store, sharing, heartbeats


def _connect(launch: LaunchEnv, wait_s: float) -> Store:
    if launch.rank == 0 and not launch.agent_store:
        return _start_store(launch)
    end = time.monotonic() + wait_s
    _wait_for_listener(launch, wait_s, end)
    left_s = max(1.0, end - time.monotonic())  # a thousand ranks may be connecting
    # torch would wait without a time limit for a listener that is not a store.
    store = call_with_timeout(
        lambda: TCPStore(launch.host, launch.port, timeout=timedelta(seconds=left_s)), left_s + _CONNECT_S
    )
    if store is None:
        raise PeerLost(
            f"rank {launch.rank} (host {node_name()}) connected to a process at {launch.endpoint} that is not "
            f"{_store_owner(launch)}: set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a port that is free "
            "there, on all ranks"
        )
    return store


def _start_store(launch: LaunchEnv) -> Store:
    """Serves the store for all ranks. Rank 0 connects through localhost and need not resolve its host name."""
    try:
        store = TCPStore("localhost", launch.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        reason = " ".join(str(error).partition("Exception raised from")[0].split())[:200]
        raise ConfigError(
            f"MASTER_PORT={launch.port} cannot be bound on {node_name()}, the host of rank 0 ({reason}): end the "
            "process that listens there, or set another MASTER_PORT on all ranks"
        ) from error
    _served.append(store)
    return store


def _store_owner(launch: LaunchEnv) -> str:
    return "torchrun's agent" if launch.agent_store else "rank 0"


def _wait_for_listener(launch: LaunchEnv, wait_s: float, end: float) -> None:
    """Waits until the endpoint accepts connections. TCPStore would write a stack trace for each failed attempt.

    Raises PeerLost.
    """
    pause = _POLL_S
    while True:
        try:
            socket.create_connection((launch.host, launch.port), max(1.0, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + pause > end:
                raise PeerLost(
                    f"rank {launch.rank} (host {node_name()}) did not reach {_store_owner(launch)} at "
                    f"{launch.endpoint} within distributed.rendezvous_s={wait_s:g} ({error.strerror or error}): check "
                    "that it runs, that MASTER_ADDR and MASTER_PORT are its host and port, and that the port is open "
                    "between hosts"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _check_in(store: Store, launch: LaunchEnv, facts: Mapping[str, str], gpu: str | None = None) -> Heartbeats:
    """Writes this rank's host, facts, device and first heartbeat. Raises ConfigError if its rank is taken."""
    if store.add(f"claimed/{launch.rank}", 1) > 1:
        raise ConfigError(
            f"a second process (host {node_name()}) is rank {launch.rank} at {launch.endpoint}: set a different RANK "
            "for each process, and a different MASTER_PORT for each job"
        )
    store.add(_cores_key(), 1)
    store.set(f"hello/{launch.rank}", json.dumps([node_name(), dict(facts), gpu]))
    heartbeats = Heartbeats(store, launch.rank, launch.world)
    store.add("arrived", 1)
    return heartbeats


def _cores_key() -> str:
    """Returns a store key for this host and core set: a launcher may bind ranks to disjoint cores."""
    return f"cores/{socket.gethostname()}/{digest(usable_cores())}"


def _wait_for_all(store: Store, launch: LaunchEnv, wait_s: float) -> PeerLost | None:
    """Waits until all ranks have checked in and logs the missing ones. After `wait_s`, returns an error with them."""
    start = time.monotonic()
    log_at = start + _LOG_AFTER_S
    while store.add("arrived", 0) < launch.world:
        now = time.monotonic()
        if now > start + wait_s:
            return PeerLost(
                f"{_describe_missing(store, launch)}; distributed.rendezvous_s={wait_s:g} has passed: check the output "
                "of the missing ranks and of their launcher, or raise distributed.rendezvous_s"
            )
        if now > log_at:
            log.warning("%s: waiting for %.0f s", _describe_missing(store, launch), now - start)
            log_at = now + 10 * _LOG_AFTER_S
        time.sleep(_POLL_S)
    return None


def _describe_missing(store: Store, launch: LaunchEnv) -> str:
    """Describes them: `ranks 2-3 of 4 have not joined n1:15077, none from n2; joined: ranks 0-1 (host n1)`."""
    present = [rank for rank in range(launch.world) if store.check([f"hello/{rank}"])]
    missing = sorted(set(range(launch.world)) - set(present))
    hosts = {rank: json.loads(store.get(f"hello/{rank}"))[0] for rank in present}
    silent = [host for host in launch.hosts if host not in hosts.values()]
    none_from = f", none from {format_names(silent)}" if silent else ""
    return (
        f"{format_ranks(missing)} of {launch.world} {'has' if len(missing) == 1 else 'have'} not joined "
        f"{launch.endpoint}{none_from}; joined: {format_ranks_with_hosts(present, hosts)}"
    )


def _compare_facts(store: Store, launch: LaunchEnv) -> ConfigError | None:
    """Compares the facts and devices of all ranks. Returns an error, or logs a warning for facts that may differ."""
    hellos = [json.loads(text) for text in store.multi_get([f"hello/{rank}" for rank in range(launch.world)])]
    hosts = [host for host, _, _ in hellos]
    for name in hellos[0][1]:
        mismatch = describe_mismatch(name.rstrip("?"), [facts.get(name, "none") for _, facts, _ in hellos], hosts)
        if mismatch and name.endswith("?"):
            log.warning(f"{mismatch}: prefer the same on all hosts")
        elif mismatch:
            return ConfigError(f"{mismatch}: use the same on all hosts, and start all ranks with the same command")
    return _find_shared_gpu(hosts, [gpu for _, _, gpu in hellos])


def _find_shared_gpu(hosts: Sequence[str], gpus: Sequence[str | None]) -> ConfigError | None:
    """Returns an error that names the ranks of the first GPU that several ranks of a host have."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, (host, gpu) in enumerate(zip(hosts, gpus, strict=True)):
        if gpu is not None:
            ranks_of.setdefault((host, gpu), []).append(rank)
    for (_, gpu), ranks in ranks_of.items():
        if len(ranks) > 1:
            return ConfigError(
                f"{format_ranks_with_hosts(ranks, hosts)} share one GPU ({gpu}), and NCCL needs one for each rank: "
                "start one process per GPU, make another GPU visible to each process (CUDA_VISIBLE_DEVICES; SLURM's "
                "--gpus-per-task=1), or try distributed.backend=gloo, which shares a GPU and is slow"
            )
    return None


def wait_until_read(store: Store, launch: LaunchEnv) -> None:
    """Waits, on rank 0, until all ranks have read from the store: it ends with rank 0. Call it before an early end."""
    if launch.rank != 0:
        return
    end = time.monotonic() + _EXIT_WAIT_S
    with contextlib.suppress(RuntimeError):  # the store of torchrun's agent has ended already
        while store.add("read", 0) < store.add("arrived", 0) and time.monotonic() < end:
            time.sleep(_POLL_S)
