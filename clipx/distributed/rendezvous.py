"""How the ranks of a job find each other: by a common store, where a roll is called: who stays away is named."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # what torch.distributed has under these names

from clipx.distributed.consistency import digest, listed, numbered, odd_ones, of_ranks
from clipx.distributed.heartbeat import within
from clipx.distributed.launch_env import Place, node_name, usable_cores
from clipx.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

_PERIOD_S = 0.05  # between two looks at how many have come, by rank 0 alone
_CONNECT_S = 1.0  # that torch may take to give up a connection, after the time that it was given
_SAY_S = 30.0  # after which rank 0 says for whom it waits
_LEAVE_S = 5.0  # for the others to hear why, where rank 0 ends with the store
_LATER_S = 30.0  # that the roll may take: ranks wait for its end from when they came, and rank 0 may be the last
_meetings = itertools.count()  # the points of a sweep in one process meet again, perhaps at the same store


@dataclass(slots=True)
class _Hello:
    """What a rank says of itself when it comes."""

    host: str
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Verdict:
    """What rank 0 says to all when the roll is called."""

    lost: str = ""
    differ: str = ""


def meet(place: Place, facts: Mapping[str, str], wait_s: float) -> tuple[Store, int]:
    """Waits until all ranks are at the store; returns it, and how many ranks share this one's cores.

    `facts` must be the same on all ranks, but for those whose name ends in `?`, of which rank 0 warns. Raises PeerLost,
    naming rank 0's host and port where it does not answer, or the ranks that do not come within `wait_s` seconds on
    all that did; ConfigError where facts differ, or the port is not to be had. A short text from each rank
    goes to rank 0, and one comes back: once connected, 100 ranks take 0.1 s on two cores.
    """
    store = PrefixStore(f"clipx/{place.job}/{next(_meetings)}", _connect(place, wait_s))
    try:
        _arrive(store, place, facts)
        if place.rank == 0:
            verdict = _call_roll(store, place, wait_s)
            store.set("verdict", json.dumps(asdict(verdict)))
        else:
            store.wait(["verdict"], timedelta(seconds=wait_s + _LATER_S))
            verdict = _Verdict(**json.loads(store.get("verdict")))
    except RuntimeError as error:
        raise PeerLost(
            f"rank 0 at {place.meeting} ended, or did not call the roll, while rank {place.rank} (host "
            f"{node_name()}) waited for it: its own output says why"
        ) from error
    if verdict.lost or verdict.differ:
        _let_all_hear(store, place)
        raise PeerLost(verdict.lost) if verdict.lost else ConfigError(verdict.differ)
    return store, store.add(_cores_of_this_host(), 0)


def _connect(place: Place, wait_s: float) -> Store:
    if place.rank == 0 and not place.agent:
        return _serve(place)
    end = time.monotonic() + wait_s
    _await_listener(place, wait_s, end)
    left_s = max(1.0, end - time.monotonic())  # a thousand may be connecting
    # Of what listens but is no store, torch would wait for an answer without end.
    store = within(lambda: TCPStore(place.host, place.port, timeout=timedelta(seconds=left_s)), left_s + _CONNECT_S)
    if store is None:
        raise PeerLost(
            f"rank {place.rank} (host {node_name()}) met something at {place.meeting} that is not {_who(place)}: give "
            "all ranks the host of rank 0 by MASTER_ADDR, and a port that is free there by MASTER_PORT"
        )
    return store


def _serve(place: Place) -> Store:
    """For all; by itself rank 0 needs no name for its host."""
    try:
        return TCPStore("localhost", place.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise ConfigError(
            f"MASTER_PORT={place.port} cannot be had on {node_name()}, the host of rank 0: something else listens "
            "there; give all ranks another, by MASTER_PORT"
        ) from error


def _who(place: Place) -> str:
    return "torchrun's agent" if place.agent else "rank 0"


def _await_listener(place: Place, wait_s: float, end: float) -> None:
    """Until somebody listens. The host's name may come with the host. Raises PeerLost."""
    pause = _PERIOD_S
    while True:
        try:
            socket.create_connection((place.host, place.port), max(1.0, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + pause > end:
                raise PeerLost(
                    f"rank {place.rank} (host {node_name()}) did not reach {_who(place)} at {place.meeting} "
                    f"within distributed.rendezvous_s={wait_s:g} ({error.strerror or error}): see there whether it "
                    "runs, whether MASTER_ADDR and MASTER_PORT are its own, and whether the port is open between hosts"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _arrive(store: Store, place: Place, facts: Mapping[str, str]) -> None:
    """Raises ConfigError where another process is this rank already."""
    if store.add(f"claimed/{place.rank}", 1) > 1:
        raise ConfigError(
            f"a second process (host {node_name()}) is rank {place.rank} at {place.meeting}: give each process a RANK "
            "of its own, and each job a MASTER_PORT of its own"
        )
    store.add(_cores_of_this_host(), 1)
    store.set(f"hello/{place.rank}", json.dumps(asdict(_Hello(node_name(), dict(facts)))))
    store.add("arrived", 1)


def _cores_of_this_host() -> str:
    """A key for these cores: ranks that a launcher has bound to cores of their own share none."""
    return f"cores/{socket.gethostname()}/{digest(usable_cores())}"


def _call_roll(store: Store, place: Place, wait_s: float) -> _Verdict:
    start = time.monotonic()
    say_at = start + _SAY_S
    while store.add("arrived", 0) < place.world:
        now = time.monotonic()
        if now > start + wait_s:
            return _Verdict(
                lost=f"{_missing(store, place)}; distributed.rendezvous_s={wait_s:g} is over: see the output of those "
                "that are missing, and of what was to start them, or wait longer"
            )
        if now > say_at:
            log.warning("%s: waiting since %.0f s", _missing(store, place), now - start)
            say_at = now + 10 * _SAY_S
        time.sleep(_PERIOD_S)
    keys = [f"hello/{rank}" for rank in range(place.world)]
    return _judge([_Hello(**json.loads(text)) for text in store.multi_get(keys)])


def _missing(store: Store, place: Place) -> str:
    """`ranks 2-3 of 4 have not come to n1:15077, nobody from n2; there are ranks 0-1 (host n1)`."""
    hosts: dict[int, str] = {}
    for rank in range(place.world):
        if store.check([f"hello/{rank}"]):
            hosts[rank] = _Hello(**json.loads(store.get(f"hello/{rank}"))).host
    missing = [rank for rank in range(place.world) if rank not in hosts]
    quiet = [host for host in place.hosts if host not in hosts.values()]
    nobody = f", nobody from {listed(quiet)}" if quiet else ""
    return (
        f"{numbered(missing)} of {place.world} {'has' if len(missing) == 1 else 'have'} not come to "
        f"{place.meeting}{nobody}; there {'is' if len(hosts) == 1 else 'are'} {of_ranks(list(hosts), hosts)}"
    )


def _judge(hellos: list[_Hello]) -> _Verdict:
    hosts = [hello.host for hello in hellos]
    for name in hellos[0].facts:
        told = odd_ones(name.rstrip("?"), [hello.facts.get(name, "none") for hello in hellos], hosts)
        if told and name.endswith("?"):
            log.warning(f"{told}: the same on all hosts is safer")
        elif told:
            return _Verdict(differ=f"{told}: make it the same on all hosts, and start all ranks by the same command")
    return _Verdict()


def _let_all_hear(store: Store, place: Place) -> None:
    """Where rank 0 ends, so does the store."""
    try:
        heard = store.add("heard", 1)
        end = time.monotonic() + _LEAVE_S
        while place.rank == 0 and heard < store.add("arrived", 0) and time.monotonic() < end:
            time.sleep(_PERIOD_S)
            heard = store.add("heard", 0)
    except RuntimeError:
        pass  # it has gone before
