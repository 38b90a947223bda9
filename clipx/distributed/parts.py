"""Parts of an output that the ranks write together, and that an interrupted command continues: see PartStore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from clipx.distributed.comm import Comm
from clipx.report.console import stdout_console
from clipx.storage.part_store import PartStore, Record


@dataclass(frozen=True, slots=True)
class Parts:
    """Consecutive parts of `size` of `total` samples, which are read in batches of `batch_size`."""

    total: int
    size: int
    batch_size: int

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def samples(self, number: int) -> range:
        """Returns the samples of a part."""
        return range(self.total)[number * self.size : (number + 1) * self.size]

    def batches(self, number: int) -> list[range]:
        """Splits the samples of a part into batches. No batch spans parts, so a part does not depend on others."""
        samples = self.samples(number)
        return [samples[at : at + self.batch_size] for at in range(0, len(samples), self.batch_size)]


@contextlib.contextmanager
def locked(store: PartStore, comm: Comm) -> Iterator[None]:
    """Locks the store by rank 0. Collective."""
    with contextlib.ExitStack() as stack:
        comm.run_on_main(lambda: stack.enter_context(store.locked()))
        yield


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
