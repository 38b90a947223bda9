"""Parts of an output that the ranks write together, and that an interrupted command continues: see PartStore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from clipx.distributed.comm import Comm
from clipx.errors import DataError, require
from clipx.report.console import stdout_console
from clipx.storage.local import acquire_lock, open_own, remove_partial
from clipx.storage.part_store import PartStore, Record
from clipx.storage.safe_json import read_as


@contextlib.contextmanager
def locked(store: PartStore, comm: Comm) -> Iterator[None]:
    """Locks a local folder against other commands, and removes temporary files of a killed command. Collective."""
    if store.folder is None:
        yield
        return
    folder = store.folder
    with open_own(folder / ".lock", "w") as lock:

        def begin() -> None:
            acquire_lock(lock, f"out={store.out}")
            remove_partial(folder)

        comm.run_on_main(begin)
        yield


def check_plan(store: PartStore, name: str, plan: dict[str, Any], what: str) -> None:
    """Compares `plan`, on which all parts depend, with that of an earlier run in the file `name`, or writes it.

    Raises ConfigError if they differ. `what`: what the parts contain, for the message.
    """
    text = store.read_text(name)
    if text is None:
        store.put_json(name, plan)
        return
    try:
        before = read_as(dict[str, Any], text)
    except ValueError as error:
        raise DataError(
            f"out={store.out}: {name} cannot be read ({error}): give another folder, or delete this one"
        ) from None
    changed = [key for key in {**before, **plan} if before.get(key) != plan.get(key)]
    differences = ", ".join(f"{key} was {before.get(key)}, is {plan.get(key)}" for key in changed)
    require(not changed, f"out={store.out} holds other {what} ({differences}): give another folder, or delete this one")


def write_missing(
    store: PartStore,
    total: int,
    write: Callable[[Sequence[int], Sequence[int]], Iterable[tuple[int, Record]]],
    comm: Comm,
    what: str,
) -> list[Record]:
    """Writes the missing ones of `total` parts, distributed over the ranks. Returns the records of all. Collective.

    Args:
        write: writes the parts of these numbers, among those that all ranks write now, and yields (number, record) of
            each when it is complete.
        what: name of the parts, for messages.
    """
    found: dict[int, Record] = {}
    for part in comm.gather_objects(store.finished(range(comm.rank, total, comm.world))):
        found |= part
    if found and comm.is_main:
        stdout_console().print(f"{len(found):,} of {total:,} {what} exist from an earlier run")
    missing = [number for number in range(total) if number not in found]
    for part in comm.gather_objects(dict(write(missing[comm.rank :: comm.world], missing))):
        found |= part
    return [found[number] for number in range(total)]
