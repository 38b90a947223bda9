"""Rendezvous through a TCPStore. Rank 0 waits for all ranks and reports the missing ones by host."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import (  # torch.distributed's, which mypy does not find there
    PrefixStore,
    Store,
    TCPStore,
)

from clipx.distributed.consistency import describe_mismatch, digest, format_names, format_ranks, format_ranks_with_hosts
from clipx.distributed.heartbeat import call_with_timeout
from clipx.distributed.launch_env import LaunchEnv, node_name, usable_cores
from clipx.errors import ClipxError, ConfigError, PeerLost

log = logging.getLogger(__name__)

_POLL_S = 0.05  # between two counts of the ranks that have come, by rank 0 alone
_CONNECT_S = 1.0  # that torch may take to give up a connection, after the time that it was given
_LOG_AFTER_S = 30.0  # after which rank 0 logs for which ranks it waits
_EXIT_WAIT_S = 5.0  # for the others to read the error, where rank 0 ends and the store with it
_VERDICT_S = 30.0  # that the comparison may take: ranks wait for it from when they came, and rank 0 may be the last
_rendezvous_numbers = itertools.count()  # the points of a sweep in one process meet again, perhaps at the same store
_ERRORS: dict[str, type[ClipxError]] = {error.__name__: error for error in (PeerLost, ConfigError)}


def rendezvous(launch: LaunchEnv, facts: Mapping[str, str], wait_s: float) -> tuple[Store, int]:
    """Waits until all ranks are at the store; returns it, and how many ranks share this one's cores.

    `facts` must be the same on all ranks, but for those whose name ends in `?`, of which rank 0 warns. Raises PeerLost,
    naming rank 0's host and port where it does not answer, or the ranks that do not come within `wait_s` seconds on
    all that did; ConfigError where facts differ, or the port is not to be had. A short text from each rank
    goes to rank 0, and one comes back: once connected, 100 ranks take 0.1 s on two cores.

    Not torch's monitored_barrier, which needs a process group, and so all ranks; nor the barrier of
    torch.distributed.elastic, which names at most 16 missing ranks, on rank 0 alone.
    """
    store = PrefixStore(f"clipx/{launch.job}/{next(_rendezvous_numbers)}", _connect(launch, wait_s))
    try:
        _check_in(store, launch, facts)
        if launch.rank == 0:
            error: ClipxError | None = _wait_for_all(store, launch, wait_s) or _compare_facts(store, launch)
            store.set("verdict", json.dumps([type(error).__name__, str(error)] if error else None))
        else:
            store.wait(["verdict"], timedelta(seconds=wait_s + _VERDICT_S))
            verdict = json.loads(store.get("verdict"))
            error = _ERRORS[verdict[0]](verdict[1]) if verdict else None
    except RuntimeError as lost:
        raise PeerLost(
            f"rank 0 at {launch.endpoint} ended, or did not call the roll, while rank {launch.rank} (host "
            f"{node_name()}) waited for it: its own output says why"
        ) from lost
    if error:
        _wait_until_read(store, launch)
        raise error
    return store, store.add(_cores_key(), 0)


def _connect(launch: LaunchEnv, wait_s: float) -> Store:
    if launch.rank == 0 and not launch.agent_store:
        return _start_store(launch)
    end = time.monotonic() + wait_s
    _wait_for_listener(launch, wait_s, end)
    left_s = max(1.0, end - time.monotonic())  # a thousand may be connecting
    # Of what listens but is no store, torch would wait for an answer without end.
    store = call_with_timeout(
        lambda: TCPStore(launch.host, launch.port, timeout=timedelta(seconds=left_s)), left_s + _CONNECT_S
    )
    if store is None:
        raise PeerLost(
            f"rank {launch.rank} (host {node_name()}) met something at {launch.endpoint} that is not "
            f"{_store_owner(launch)}: give all ranks the host of rank 0 by MASTER_ADDR, and a port that is free there "
            "by MASTER_PORT"
        )
    return store


def _start_store(launch: LaunchEnv) -> Store:
    """Serves the store for all ranks; rank 0 itself needs no name of its host."""
    try:
        return TCPStore("localhost", launch.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise ConfigError(
            f"MASTER_PORT={launch.port} cannot be had on {node_name()}, the host of rank 0: something else listens "
            "there; give all ranks another, by MASTER_PORT"
        ) from error


def _store_owner(launch: LaunchEnv) -> str:
    return "torchrun's agent" if launch.agent_store else "rank 0"


def _wait_for_listener(launch: LaunchEnv, wait_s: float, end: float) -> None:
    """Waits until the endpoint accepts connections; its host's name may not be known before. Raises PeerLost.

    TCPStore would wait as well, but writes a stack trace to stderr for each failed attempt.
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
                    f"{launch.endpoint} within distributed.rendezvous_s={wait_s:g} ({error.strerror or error}): see "
                    "there whether it runs, whether MASTER_ADDR and MASTER_PORT are its own, and whether the port is "
                    "open between hosts"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _check_in(store: Store, launch: LaunchEnv, facts: Mapping[str, str]) -> None:
    """Writes this rank's host and facts to the store. Raises ConfigError where another process has its rank."""
    if store.add(f"claimed/{launch.rank}", 1) > 1:
        raise ConfigError(
            f"a second process (host {node_name()}) is rank {launch.rank} at {launch.endpoint}: give each process a "
            "RANK of its own, and each job a MASTER_PORT of its own"
        )
    store.add(_cores_key(), 1)
    store.set(f"hello/{launch.rank}", json.dumps([node_name(), dict(facts)]))
    store.add("arrived", 1)


def _cores_key() -> str:
    """A key for this host and these cores: ranks that a launcher has bound to cores of their own share none."""
    return f"cores/{socket.gethostname()}/{digest(usable_cores())}"


def _wait_for_all(store: Store, launch: LaunchEnv, wait_s: float) -> PeerLost | None:
    """Waits until all ranks have checked in; logs the missing ones, and returns the error that names them."""
    start = time.monotonic()
    log_at = start + _LOG_AFTER_S
    while store.add("arrived", 0) < launch.world:
        now = time.monotonic()
        if now > start + wait_s:
            return PeerLost(
                f"{_describe_missing(store, launch)}; distributed.rendezvous_s={wait_s:g} is over: see the output of "
                "those that are missing, and of what was to start them, or wait longer"
            )
        if now > log_at:
            log.warning("%s: waiting since %.0f s", _describe_missing(store, launch), now - start)
            log_at = now + 10 * _LOG_AFTER_S
        time.sleep(_POLL_S)
    return None


def _describe_missing(store: Store, launch: LaunchEnv) -> str:
    """`ranks 2-3 of 4 have not come to n1:15077, nobody from n2; there are ranks 0-1 (host n1)`."""
    present = [rank for rank in range(launch.world) if store.check([f"hello/{rank}"])]
    missing = sorted(set(range(launch.world)) - set(present))
    hosts = {rank: json.loads(store.get(f"hello/{rank}"))[0] for rank in present}
    silent = [host for host in launch.hosts if host not in hosts.values()]
    nobody = f", nobody from {format_names(silent)}" if silent else ""
    return (
        f"{format_ranks(missing)} of {launch.world} {'has' if len(missing) == 1 else 'have'} not come to "
        f"{launch.endpoint}{nobody}; there {'is' if len(hosts) == 1 else 'are'} "
        f"{format_ranks_with_hosts(present, hosts)}"
    )


def _compare_facts(store: Store, launch: LaunchEnv) -> ConfigError | None:
    """Compares the facts of all ranks; returns the error for those that differ and must not, warns of the others."""
    hellos = [json.loads(text) for text in store.multi_get([f"hello/{rank}" for rank in range(launch.world)])]
    hosts = [host for host, _ in hellos]
    for name in hellos[0][1]:
        mismatch = describe_mismatch(name.rstrip("?"), [facts.get(name, "none") for _, facts in hellos], hosts)
        if mismatch and name.endswith("?"):
            log.warning(f"{mismatch}: the same on all hosts is safer")
        elif mismatch:
            return ConfigError(f"{mismatch}: make it the same on all hosts, and start all ranks by the same command")
    return None


def _wait_until_read(store: Store, launch: LaunchEnv) -> None:
    """Waits, on rank 0, until all ranks have read the verdict: where rank 0 ends, so does the store."""
    try:
        read = store.add("read", 1)
        end = time.monotonic() + _EXIT_WAIT_S
        while launch.rank == 0 and read < store.add("arrived", 0) and time.monotonic() < end:
            time.sleep(_POLL_S)
            read = store.add("read", 0)
    except RuntimeError:
        pass  # it has gone before
