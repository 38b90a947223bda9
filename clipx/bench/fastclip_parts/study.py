"""Data and sweeps of the FastCLIP comparison, each by a command that a user would type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipx.bench.findings import Table
from clipx.bench.spec import BenchError
from clipx.report.seed_statistics import Difference, difference
from clipx.storage.jsonl import read_objects

CONTENDER = "experiment/fastclip_small"
"""Config group of the contenders, the key by which reports compare."""

REFERENCED = "drrho_clip"
"""Contender that needs a reference model."""
REFERENCE = "dcl"
"""Contender that trains the reference models."""

Key = dict[str, str]
"""Overrides that select cells of a report."""


@dataclass(frozen=True, slots=True)
class StudyData:
    """Folder of stored features, and the overrides that select them, the tokenizer, and references if there are any."""

    folder: Path
    overrides: tuple[str, ...]
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """Folder of the comparison, and the number of runs at the same time."""

    folder: Path
    processes: int
    overrides: tuple[str, ...]
    log: Callable[[str], None]

    def train_trunk(self, duration: str) -> Path:
        """Trains the model whose image embeddings are stored, unless it is trained. Returns its run directory."""
        run = self.folder / "trunk"
        if not _has_ended(run):
            self.log(f"training the trunk for {duration}")
            words = ("data.seed=1", "seed=100", f"duration={duration}", "resume=auto", "logger=[]", "report=false")
            self.call("trunk", "clipx.train", f"run_dir={run}", "name=trunk", "data=shapes", *words)
        return run

    def prepare(self, name: str, trunk: Path, samples: int, gallery: int, seed: int) -> StudyData:
        """Stores the image embeddings of scenes drawn with `seed`, and the words of their captions, unless stored."""
        folder, words = self.folder / name, self.folder / "words.json"
        scenes = ("data=shapes", f"data.samples={samples}", f"data.held_out_samples={gallery}")
        for split in ("train", "held_out"):
            out = folder / split
            if not (out / "manifest.json").is_file():
                self.log(f"storing the features of {name}, {split}")
                options = (f"run={trunk}", f"split={split}", "format=webdataset", f"out={out}", "distributed=cpu")
                self.call(f"embed-{name}-{split}", "clipx.embed", *options, *scenes, f"data.seed={seed}")
        if not words.is_file():
            self.call("words", "clipx.data.vocabulary", *scenes[:2], "size=64", f"out={words}")
        return StudyData(
            folder,
            (
                f"data.shards='{folder / 'train'}/*.tar'",
                f"data.held_out_shards='{folder / 'held_out'}/*.tar'",
                f"model.text.tokenizer={words}",
            ),
        )

    def prepare_openclipart(self) -> StudyData:
        """Writes the shards and the words of real pictures, unless written. Needs two Debian packages."""
        folder = self.folder / "openclipart"
        words, shards = folder / "words.json", f"data.shards='{folder}/*.tar'"
        if not words.is_file():
            self.log("preparing openclipart")
            self.call("openclipart", "clipx.data.openclipart", f"out={folder}")
            self.call("words", "clipx.data.vocabulary", "data=openclipart", shards, "size=2048", f"out={words}")
        return StudyData(folder, (shards, f"model.text.tokenizer={words}"))

    def train_references(self, data: StudyData, cells: Iterable[tuple[float, int]]) -> StudyData:
        """Trains and embeds the references of DRRho-CLIP for each (share of exchanged captions, seed), unless done.

        A reference has half the width of the text tower. Returns the data with the references' embeddings.
        """
        root = data.folder / "references"
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(lambda cell: self._train_reference(data, root / f"{cell[0]}-{cell[1]}", *cell), cells))
        embeddings = f"teacher.embeddings='{root}/${{data.mismatched}}-${{seed}}/embeddings'"
        return replace(data, references=(embeddings,))

    def _train_reference(self, data: StudyData, run: Path, mismatched: float, seed: int) -> None:
        name = f"reference-{data.folder.name}-{run.name}"
        if not _has_ended(run):
            self.log(f"training the reference {run.name}")
            chosen = ("experiment=fastclip_small", f"{CONTENDER}={REFERENCE}", *data.overrides, "data.batch_size=64")
            cell = (f"data.mismatched={mismatched}", f"seed={seed}", "model.text.width=32", "checkpoint=local")
            options = ("checkpoint.every=end", "evaluator.retrieval.every=end", f"run_dir={run}", "name=reference")
            self.call(name, "clipx.train", *chosen, *cell, *options, "resume=auto")
        if not (run / "embeddings" / "manifest.json").is_file():
            self.call(name, "clipx.embed", f"run={run}", f"out={run / 'embeddings'}", "distributed=cpu")

    def sweep(self, name: str, experiment: str, data: StudyData, *words: str, processes: int | None = None) -> Path:
        """Runs the points of a sweep that have not finished, in FOLDER/NAME. Returns that folder."""
        folder = self.folder / name
        self.log(f"sweep {name}")
        launcher = ("hydra/launcher=clipx_local", f"hydra.launcher.parallelism={processes or self.processes}")
        chosen = (f"experiment={experiment}", *data.overrides, *words, *self.overrides)
        self.call(name, "clipx.train", "-m", *chosen, *launcher, f"hydra.sweep.dir={folder}")
        return folder

    def report(self, name: str, *sweeps: str, by: str = CONTENDER) -> Report:
        """Writes the page of some sweeps, NAME.html, which compares the values of `by`, and returns its numbers."""
        page = self.folder / f"{name}.html"
        folders = [str(self.folder / sweep) for sweep in sweeps]
        self.call(f"report-{name}", "clipx_launch", "report", *folders, "--by", by, "--out", str(page))
        found = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
        if found["left_out"]:
            raise BenchError(f"{len(found['left_out'])} runs of {', '.join(folders)} have no result: see {page}")
        return Report(found)

    def call(self, name: str, module: str, *words: str) -> None:
        """Runs a command, with its output in FOLDER/logs/NAME.log. Raises BenchError if it fails."""
        path = self.folder / "logs" / f"{name.replace('/', '-')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            code = subprocess.run(
                [sys.executable, "-m", module, *words], stdout=file, stderr=file, env=os.environ, check=False
            ).returncode
        if code:
            last = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise BenchError(f"{module} ended with exit code {code}: {' / '.join(last)[-600:]}; see {path}")


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers of a report page."""

    content: dict[str, Any]

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Groups of runs: {overrides, seeds, mean, deviation, values, curve, …}."""
        found: list[dict[str, Any]] = self.content["cells"]
        return found

    def cell(self, contender: str, key: Key) -> dict[str, Any] | None:
        """Returns the group of a contender at `key`, or None, also if a key of it has one value in all runs."""
        wanted = {CONTENDER: contender, **key}
        return next((cell for cell in self.cells if wanted.items() <= cell["overrides"].items()), None)

    def difference(self, a: str, b: str, key: Key, key_b: Key | None = None) -> Difference | None:
        """Returns the difference of two contenders over the seeds, None if either is missing."""
        first, second = self.cell(a, key), self.cell(b, key if key_b is None else key_b)
        return None if first is None or second is None else difference(first["values"], second["values"])

    def table(self, title: str) -> Table:
        """Returns the means and deviations of all groups, in per cent."""
        found = dict.fromkeys(key for cell in self.cells for key in cell["overrides"])
        keys = [key for key in found if key not in self.content["tied"]]
        table = Table(f"{title}: {self.content['metric']}, %", (*keys, "mean", "deviation", "seeds"))
        for cell in self.cells:
            deviation = "" if cell["deviation"] is None else f"{100 * cell['deviation']:.1f}"
            own = [cell["overrides"].get(key, "") for key in keys]
            table.rows.append((*own, f"{100 * cell['mean']:.1f}", deviation, str(len(cell["values"]))))
        return table


def _has_ended(run: Path) -> bool:
    events, _ = read_objects(run / "events.jsonl")
    return any(event.get("event") == "end" for event in events)
