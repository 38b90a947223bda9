"""Selection of training samples (data.keep, data.where, data.weights): time and memory of a start, by their number."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.bench.findings import Findings, Table
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench.selection_parts import Start

_MOST_PER_SHARD = 1 << 20


@option("bench")
@dataclass(kw_only=True, slots=True)
class SelectionSpec(BenchSpec):
    """Starts that select half of the samples of listed shards, by each kind of file. The shards do not exist: a start
    does not read them."""

    kind: str = "selection"
    """Name of this benchmark in the registry."""

    samples: list[int] = field(default_factory=lambda: [2_000_000, 5_000_000])
    """Numbers of samples, each a multiple of `per_shard`. The disk needs about 60 bytes for each sample of the largest,
    30 without uids."""

    per_shard: int = 10_000
    """Number of samples in each shard, in [1, 1048576]."""

    uids: bool = True
    """Measures uids as well, which need a Parquet file next to each shard."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("per_shard")
        require(self.per_shard <= _MOST_PER_SHARD, f"per_shard={self.per_shard} is more than {_MOST_PER_SHARD:,}")
        require(bool(self.samples), "samples=[] is empty: give at least one number, samples=[2000000]")
        for count in self.samples:
            require(
                count >= self.per_shard and count % self.per_shard == 0,
                f"samples={self.samples}: {count} must be a multiple of per_shard={self.per_shard}",
            )

    def run(self, log: Callable[[str], None]) -> Findings:
        sizes = sorted(set(self.samples))
        found = {samples: self._measured(samples, log) for samples in sizes}
        tables = [_table(samples, starts) for samples, starts in found.items()]
        figures: dict[str, object] = {f"{n}": {k: asdict(s) for k, s in starts.items()} for n, starts in found.items()}
        return Findings(figures, figures, tables)

    def _measured(self, samples: int, log: Callable[[str], None]) -> dict[str, Start]:
        from clipx.bench.selection_parts import options, start, write_inputs

        processes, shards = Processes("cpu", self.threads), samples // self.per_shard
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            log(f"{samples:,} samples: writing the files")
            processes.run(write_inputs, folder, shards, self.per_shard, self.uids, self.seed)
            for name, chosen in options(folder, self.uids).items():
                cache = str(Path(folder) / f"cache {name}")
                first, later = (
                    processes.run(start, cache, folder, shards, self.per_shard, chosen, again)[0]
                    for again in (False, True)
                )
                found[name] = first.with_later(later)
                log(f"{samples:,} samples, {name}: {found[name]}")
        return found


def _table(samples: int, starts: Mapping[str, Start]) -> Table:
    first = ("first start, s", "CPU s", "own MiB", "with mapped files")
    later = ("later start, s", "own MiB", "worker, own MiB", "cache, MiB")
    table = Table(f"{samples:,} samples", ("", "selected", *first, *later))
    for name, start in starts.items():
        seconds = (f"{start.first_s:.1f}", f"{start.first_cpu_s:.1f}")
        memory = (f"{start.first_own_mib:.0f}", f"{start.first_resident_mib:.0f}")
        again = (f"{start.later_s:.2f}", f"{start.later_own_mib:.0f}", f"{start.worker_own_mib:.1f}")
        table.rows.append((name, f"{start.selected:,}", *seconds, *memory, *again, f"{start.cache_mib:.0f}"))
    return table
