"""FastCLIP against InfoNCE, DCL and SigLIP, in an hour on two cores: `python examples/fastclip_study.py FOLDER`.

Data, sweeps, report pages, hypotheses, and the search that tuned the contenders: each step is a command that a user
would type. The same command continues where a killed one stopped. docs/benchmarks/fastclip.md has design and results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clipx.distributed.launch_env import cores
from clipx.errors import ConfigError, DataError
from clipx.logger import read_rows
from clipx.report.console import stdout_console, text_table
from clipx.report.seed_statistics import CurvePoint, Difference, difference, samples_to_reach
from clipx.storage.jsonl import read_objects
from clipx.storage.local import write_atomically
from clipx.storage.url import check_path
from clipx.version import __version__

HERE = Path(__file__).resolve().parent
CONTENDER = "experiment/fastclip_small"  # group of the contenders in conf/, by which reports compare
SWEEPS = ("core", "gamma", "optimizers", "successors", "openclipart")  # conf/experiment/fastclip_small_PART.yaml
TUNINGS = ("tuning", "tuning_successors")

Key = Mapping[str, str]
"""Overrides that select cells."""
Cells = Sequence[Mapping[str, Any]]
"""Groups of runs of a report: {overrides, values of the seeds, mean, deviation, curve}."""
Row = tuple[str, ...]


# ------------------------------------------------------------------------------------------------- data and sweeps


@dataclass(frozen=True)
class Study:
    """Options of the command line. The methods run what has not finished."""

    folder: Path
    parts: Sequence[str]
    processes: int
    overrides: Sequence[str]
    samples: int
    gallery: int
    trunk: str

    def call(self, name: str, *words: str) -> None:
        """Runs `python WORDS…`, with its output in FOLDER/logs/NAME.log. Ends the study if it fails."""
        path = self.folder / "logs" / f"{name.replace('/', '-')}.log"
        path.parent.mkdir(exist_ok=True)
        print(f"{datetime.now():%H:%M:%S} {name}", flush=True)
        with path.open("a", encoding="utf-8") as file:
            code = subprocess.run([sys.executable, *words], stdout=file, stderr=file, check=False).returncode
        if code:
            last = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise SystemExit(f"{name} ended with exit code {code}: {' / '.join(last)[-600:]}; see {path}")

    def scenes(self, name: str, seed: int) -> Sequence[str]:
        """Stores embeddings of scenes drawn with `seed`, by a model that was trained on other scenes, the trunk.

        Returns the overrides that select them.
        """
        trunk, folder, words = self.folder / "trunk", self.folder / name, self.folder / "words.json"
        if not has_ended(trunk):
            options = (f"run_dir={trunk}", f"duration={self.trunk}", "resume=auto", "logger=[]", "report=false")
            self.call("trunk", "-m", "clipx.train", "name=trunk", "data=shapes", "data.seed=1", "seed=100", *options)
        drawn = ("data=shapes", f"data.samples={self.samples}", f"data.held_out_samples={self.gallery}")
        for split in ("train", "held_out"):
            out = folder / split
            if not (out / "manifest.json").is_file():
                options = (f"run={trunk}", f"split={split}", "format=webdataset", f"out={out}", "distributed=cpu")
                self.call(f"embed-{name}-{split}", "-m", "clipx.embed", *options, *drawn, f"data.seed={seed}")
        if not words.is_file():
            self.call("words", "-m", "clipx.vocabulary", *drawn[:2], "size=64", f"out={words}")
        shards = (f"data.shards='{folder}/train/*.tar'", f"data.held_out_shards='{folder}/held_out/*.tar'")
        return *shards, f"model.text.tokenizer={words}"

    def openclipart(self) -> Sequence[str]:
        """Writes shards of real pictures, from two Debian packages. Returns the words that select them."""
        folder, config = self.folder / "openclipart", ("--config-dir", str(HERE / "conf"))
        words, shards = folder / "words.json", f"data.shards='{folder}/*.tar'"
        if not words.is_file():
            self.call("openclipart", str(HERE / "openclipart/build.py"), str(folder))
            options = ("data=openclipart", shards, "size=2048", f"out={words}")
            self.call("words", "-m", "clipx.vocabulary", *config, *options)
        return *config, shards, f"model.text.tokenizer={words}"

    def references(self, name: str, data: Sequence[str], cells: Iterable[tuple[float, int]]) -> str:
        """Trains and embeds a reference for each (share of exchanged captions, seed). Returns the override of all."""
        root = self.folder / name / "references"

        def train(cell: tuple[float, int]) -> None:
            run = root / f"{cell[0]}-{cell[1]}"
            log = f"reference-{name}-{run.name}"
            if not has_ended(run):
                chosen = ("experiment=fastclip_small", f"{CONTENDER}=dcl", *data, "data.batch_size=64")
                point = (f"data.mismatched={cell[0]}", f"seed={cell[1]}", "model.text.width=32", "checkpoint=local")
                options = ("checkpoint.every=end", "evaluator.retrieval.every=end", f"run_dir={run}", "name=reference")
                self.call(log, "-m", "clipx.train", *chosen, *point, *options, "resume=auto")
            if not (run / "embeddings/manifest.json").is_file():
                self.call(log, "-m", "clipx.embed", f"run={run}", f"out={run / 'embeddings'}", "distributed=cpu")

        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(train, cells))
        return f"teacher.embeddings='{root}/${{data.mismatched}}-${{seed}}/embeddings'"

    def sweep(self, name: str, experiment: str, *words: str, processes: int = 0) -> Path:
        """Runs the points of a sweep that have not finished, in FOLDER/NAME. Returns that folder."""
        launcher = ("hydra/launcher=clipx_local", f"hydra.launcher.parallelism={processes or self.processes}")
        options = (*words, *self.overrides, *launcher, f"hydra.sweep.dir={self.folder / name}")
        self.call(name, "-m", "clipx.train", "-m", f"experiment={experiment}", *options)
        return self.folder / name

    def run(self, part: str) -> Mapping[str, Any]:
        """Runs a part that is a sweep. The successors' page also has the contenders of the core, if they have run."""
        data = self.openclipart() if part == "openclipart" else self.scenes("features", seed=0)
        experiment = "fastclip_small" if part == "core" else f"fastclip_small_{part}"
        if part == "successors":
            reference = self.references("features", data, itertools.product((0.0, 0.2), range(5)))
            sweeps = ["core"] if (self.folder / "core.json").is_file() else []
            for name, words in (("neuclip", data), ("drrho_clip", (*data, reference))):
                sweeps.append(f"successors-{name}")
                self.sweep(sweeps[-1], experiment, f"{CONTENDER}={name}", *words)
            return self.report(part, sweeps)
        name = "openclipart-sweep" if part == "openclipart" else part  # its data are in FOLDER/openclipart
        self.sweep(name, experiment, *data)
        return self.report(part, [name], by="optimizer" if part == "optimizers" else CONTENDER)

    def report(self, part: str, sweeps: Iterable[str], by: str = CONTENDER) -> Mapping[str, Any]:
        """Writes the page of some sweeps, PART.html, which compares the values of `by`. Returns its numbers."""
        page = self.folder / f"{part}.html"
        folders = [str(self.folder / sweep) for sweep in sweeps]
        self.call(f"report-{part}", "-m", "clipx_launch", "report", *folders, "--by", by, "--out", str(page))
        found: Mapping[str, Any] = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
        if found["left_out"]:
            raise SystemExit(f"{len(found['left_out'])} runs of {', '.join(folders)} have no result: see {page}")
        return found


def has_ended(run: Path) -> bool:
    """Returns whether a run has finished."""
    return any(event.get("event") == "end" for event in read_objects(run / "events.jsonl"))


def table(found: Mapping[str, Any]) -> tuple[Sequence[str], list[Row]]:
    """Returns the columns and the rows of a report: means and deviations of its groups, in per cent."""
    keys = dict.fromkeys(key for cell in found["cells"] for key in cell["overrides"] if key not in found["tied"])
    rows: list[Row] = []
    for cell in found["cells"]:
        deviation = "" if cell["deviation"] is None else f"{100 * cell['deviation']:.1f}"
        own = (cell["overrides"].get(key, "") for key in keys)
        rows.append((*own, f"{100 * cell['mean']:.1f}", deviation, str(len(cell["values"]))))
    return (*keys, "mean", "deviation", "seeds"), rows


# ------------------------------------------------------------------------------------------------------- hypotheses

BATCHES, GAMMAS = ("16", "64", "256"), ("0.2", "0.5", "0.8")
V1, V3, CONSTANT_INFONCE = "fastclip_v1", "fastclip_v3", "infonce_constant"
NOISY = {"data.batch_size": "16", "data.mismatched": "0.2"}
AT_NOISY = "at B = 16 with exchanged captions, "
LEAST_SPEEDUP = 1.32  # the least of FastCLIP v3's speed-ups over OpenCLIP in arXiv:2407.01445
Gaps = Mapping[str, Difference | None]
HYPOTHESIS = ("number", "hypothesis", "measured", "verdict")


def verdicts(parts: Mapping[str, Cells]) -> list[Row]:
    """Returns the registered hypotheses that the parts can test, as rows of HYPOTHESIS."""
    rows: list[Row] = []
    if "core" in parts:
        core = parts["core"]
        other = best_infonce(core, NOISY)
        for number, name in (("H2", V1), ("H3", V3)):
            gaps = {"": gap(core, name, other, NOISY)}
            text = f"{AT_NOISY}{name} - {other} > 2 pooled deviations"
            rows.append(verdict(number, text, gaps, lambda found: (found[0].units or 0) > 2))
        for number, name in (("H4", V1), ("H5", V3)):
            keys = {f"B = {batch}": {**NOISY, "data.batch_size": batch} for batch in BATCHES}
            gaps = {batch: gap(core, name, best_infonce(core, key), key) for batch, key in keys.items()}
            text = f"with exchanged captions, {name} - InfoNCE falls from B = 16 to 64 to 256"
            rows.append(verdict(number, text, gaps, fall))
        rows.append(fewer_samples(core, other))
    if "gamma" in parts:
        constant, cosine = (
            {low: {"objective.gamma.minimum": low, "objective.gamma.schedule": schedule} for low in GAMMAS}
            for schedule in ("constant", "cosine")
        )
        gaps = {low: gap(parts["gamma"], V1, "sogclr", cosine[low], constant[low]) for low in GAMMAS}
        text = f"{AT_NOISY}v1 - SogCLR > 0 at final γ 0.2, 0.5 and 0.8"
        rows.append(verdict("H1", text, gaps, lambda found: all(one.difference > 0 for one in found)))
        gaps = {f"{v} {low}": gap(parts["gamma"], v, v, cosine[low], constant[low]) for v in (V1, V3) for low in GAMMAS}
        text = f"{AT_NOISY}cosine - constant γ >= 0 for v1 and v3 at each final γ"
        rows.append(verdict("H7", text, gaps, lambda found: all(one.difference >= 0 for one in found)))
    if "openclipart" in parts:
        gaps = {"": gap(parts["openclipart"], V1, CONSTANT_INFONCE, {"data.mismatched": "0.2"})}
        text = f"on openclipart with exchanged captions, v1 - {CONSTANT_INFONCE} > 0"
        rows.append(verdict("H8", text, gaps, lambda found: found[0].difference > 0))
    return sorted(rows)


def verdict(number: str, text: str, gaps: Gaps, holds: Callable[[list[Difference]], bool]) -> Row:
    """Returns the row of a hypothesis: differences in points, with their size in pooled deviations, and the verdict."""
    known = {name: one for name, one in gaps.items() if one is not None}
    measured = ", ".join(
        f"{f'{name}: ' if name else ''}{100 * one.difference:+.1f}"
        f"{'' if one.units is None else f' ({one.units:+.1f} dev.)'}"
        for name, one in known.items()
    )
    if len(known) < len(gaps):
        return number, text, measured, "not measured"
    return number, text, measured, "holds" if holds([*known.values()]) else "refuted"


def fall(found: list[Difference]) -> bool:
    """Returns whether differences become smaller from one to the next."""
    return all(a.difference > b.difference for a, b in itertools.pairwise(found))


def fewer_samples(core: Cells, other: str) -> Row:
    """Tests H6: v3 reaches InfoNCE's final accuracy with fewer samples."""
    row = ("H6", f"{AT_NOISY}v3 reaches InfoNCE's final recall@1 with 1/{LEAST_SPEEDUP} of its samples")
    ours, theirs = cell(core, V3, NOISY), cell(core, other, NOISY)
    if ours is None or theirs is None or not ours["curve"] or not theirs["curve"]:
        return *row, "", "not measured"
    curve = [CurvePoint(**point) for point in ours["curve"]]
    reached = samples_to_reach(curve, theirs["mean"])
    if reached is None:
        return *row, "not reached", "refuted"
    final = theirs["curve"][-1]["samples"]
    speedup = final / reached
    measured = f"{reached:,.0f} of {final:,.0f} samples{' or fewer' if reached == curve[0].samples else ''}: "
    return *row, f"{measured}{speedup:.2f} times fewer", "holds" if speedup >= LEAST_SPEEDUP else "refuted"


def best_infonce(core: Cells, key: Key) -> str:
    """Returns the InfoNCE contender with the higher mean at `key`: learned or constant temperature."""
    means = {name: one["mean"] for name in ("infonce", CONSTANT_INFONCE) if (one := cell(core, name, key))}
    return max(means, key=lambda name: means[name], default="infonce")


def gap(cells: Cells, a: str, b: str, key: Key, key_b: Key | None = None) -> Difference | None:
    """Returns the difference a - b of two contenders over the seeds, None if either is missing."""
    first, second = cell(cells, a, key), cell(cells, b, key if key_b is None else key_b)
    return None if first is None or second is None else difference(first["values"], second["values"])


def cell(cells: Cells, contender: str, key: Key) -> Mapping[str, Any] | None:
    """Returns the group of a contender at `key`, or None, also if a key of it has one value in all runs."""
    wanted = {CONTENDER: contender, **key}
    return next((one for one in cells if wanted.items() <= one["overrides"].items()), None)


# ----------------------------------------------------------------------------------------------------------- tuning

SEED = 50
SEARCH = {"seed": str(SEED), "data.mismatched": "0.2", "evaluator.retrieval.every": "end"}
RECALL = ("eval/retrieval/image_to_text/recall@1", "eval/retrieval/text_to_image/recall@1")
RATE, INITIAL, CONSTANT = "optimizer.lr", "objective.init_temperature", "objective.temperature"
GAMMA, BIAS = "objective.gamma.minimum", "objective.init_bias"
GRIDS: dict[str, Sequence[str]] = dict.fromkeys((INITIAL, CONSTANT), ("0.05", "0.1", "0.2", "0.4"))
GRIDS |= {GAMMA: GAMMAS, BIAS: ("-10", "-5", "-2.5")}
RATES = {  # by batch size
    "16": ("3e-4", "6e-4", "1.2e-3", "2.4e-3", "1.5e-4"),
    "64": ("6e-4", "1.2e-3", "2.4e-3", "4.8e-3", "3e-4"),
    "256": ("1.2e-3", "2.4e-3", "4.8e-3", "9.6e-3", "6e-4"),
}
CONTENDERS: Mapping[str, Sequence[str]] = {  # keys that are tuned, in this order
    **dict.fromkeys(("infonce", "infonce_constant", "dcl"), (INITIAL, RATE)),
    "siglip": (INITIAL, RATE, BIAS),
    **dict.fromkeys(("sogclr", "fastclip_v1"), (CONSTANT, RATE, GAMMA)),
    **dict.fromkeys(("isogclr", "fastclip_v0", "fastclip_v2", "fastclip_v3"), (INITIAL, RATE, GAMMA)),
}
SUCCESSORS: Mapping[str, Sequence[str]] = {"drrho_clip": (INITIAL, RATE, GAMMA), "neuclip": (INITIAL, RATE)}
OPTIMIZERS = {
    "adamw_tiny": ("6e-4", "1.2e-3", "2.4e-3", "4.8e-3"),
    "lamb": ("2e-3", "4e-3", "8e-3", "1.6e-2"),
    "lion": ("5e-5", "1e-4", "2e-4", "4e-4", "8e-4"),
    "sgd": ("0.03", "0.1", "0.3", "1"),
    "muon": ("3e-4", "6e-4", "1.2e-3", "2.4e-3", "4.8e-3"),
}
TUNED = ("contender and batch size", "values", "recall@1, %")


def tune(study: Study, part: str) -> tuple[Sequence[str], list[Row]]:
    """Searches the values of conf/experiment/fastclip_small, on other scenes and another seed. Returns a table.

    For each contender and batch size, one value after another, each at the best ones so far. All runs have exchanged
    captions, which the hypotheses are about; the runs without them use the same values.
    """
    data = study.scenes("tuning", seed=2)
    contenders, optimizers = (CONTENDERS, OPTIMIZERS) if part == "tuning" else (SUCCESSORS, {})
    reference = study.references("tuning", data, [(0.2, SEED)]) if part == "tuning_successors" else ""

    def search(name: str, fixed: Key, grids: Mapping[str, Sequence[str]]) -> Row:
        words = (*data, reference) if fixed[CONTENDER] == "drrho_clip" else data
        chosen, recall = {key: values[1] for key, values in grids.items()}, 0.0
        for key, values in grids.items():
            point = {**fixed, **chosen, key: ",".join(values), **SEARCH}
            overrides = (f"{other}={value}" for other, value in point.items())
            place = f"tuning-sweeps/{name}-{key.rpartition('.')[2]}"
            runs = study.sweep(place, "fastclip_small", *words, *overrides, processes=1)
            recalls = [recall_of(runs / str(number)) for number in range(len(values))]
            recall, chosen[key] = max(zip(recalls, values, strict=True), key=lambda pair: pair[0])
        return name, " ".join(f"{key}={value}" for key, value in chosen.items()), f"{100 * recall:.1f}"

    searches: list[tuple[str, Key, Mapping[str, Sequence[str]]]] = []
    for batch, (name, keys) in itertools.product(BATCHES, contenders.items()):
        grids = {key: RATES[batch] if key == RATE else GRIDS[key] for key in keys}
        searches.append((f"{name}-{batch}", {CONTENDER: name, "data.batch_size": batch}, grids))
    for name, rates in optimizers.items():
        fixed = {CONTENDER: V3, "data.batch_size": "64", "optimizer": name}
        searches.append((f"{name}-64", fixed, {RATE: rates}))
    with ThreadPoolExecutor(study.processes) as pool:
        return TUNED, list(pool.map(lambda one: search(*one), searches))


def recall_of(run: Path) -> float:
    """Returns the last recall@1 of a run, the mean of both directions. Ends the study if there is none."""
    for row in reversed(read_rows(run / "metrics.jsonl")):
        if all(name in row for name in RECALL):
            return sum(row[name] for name in RECALL) / len(RECALL)
    raise SystemExit(f"{run} has no recall@1: see its log")


# ---------------------------------------------------------------------------------------------------------- command


def main() -> None:
    """Runs the parts, adds them to FOLDER/results.json, and prints their tables."""
    study = options()
    console, path = stdout_console(), study.folder / "results.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("parts", {}) if path.is_file() else {}
    origin = {"command": shlex.join(sys.argv), "commit": commit(), "clipx": __version__, "torch": version("torch")}
    for part in study.parts:
        if part in TUNINGS:
            (columns, rows), title = tune(study, part), "tuned on exchanged captions of other scenes"
            content: Mapping[str, Any] = {"tuned": [dict(zip(TUNED, row, strict=True)) for row in rows]}
        else:
            found = study.run(part)
            (columns, rows), title = table(found), "the mean of both directions, %"
            content = {"cells": found["cells"]}
        title = f"{part}: {title}; recall@1 among {study.gallery} scenes"
        console.print(text_table(columns, rows, title, right=columns[1:]))
        known[part] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **origin, **content}
        hypotheses = verdicts({name: one["cells"] for name, one in known.items() if "cells" in one})
        listed = [dict(zip(HYPOTHESIS, row, strict=True)) for row in hypotheses]
        write(path, json.dumps({"parts": known, "hypotheses": listed}, indent=1) + "\n")
    if hypotheses:
        console.print(text_table(HYPOTHESIS, hypotheses, "registered hypotheses"))
    console.print(f"written to {path}")


def options() -> Study:
    """Reads the command line. Bad options end the process with exit code 2."""
    names = (*SWEEPS, *TUNINGS)
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="data, runs, report pages and results.json")
    add("--parts", nargs="+", choices=names, default=["core"], metavar="PART", help=f"of {', '.join(names)}")
    add("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="of every sweep, such as duration=40ep")
    add("--processes", type=int, default=cores(), help="runs at the same time, by default one for each core")
    add("--samples", type=int, default=1000, help="training scenes, at least 256, the largest batch")
    add("--gallery", type=int, default=960, help="held-out scenes, at least 2, among which retrieval ranks")
    add("--trunk", default="9ep", help="duration of the training of the model whose image embeddings are stored")
    given = parser.parse_args()
    for name, least in (("processes", 1), ("samples", 256), ("gallery", 2)):
        if (number := getattr(given, name)) < least:
            parser.error(f"--{name} {number} must be at least {least}")
    drawn = f"--samples {given.samples} --gallery {given.gallery} --trunk {given.trunk}"
    try:
        check_path("FOLDER", given.folder)
        given.folder = Path(given.folder)
        path = given.folder / "data.txt"
        given.folder.mkdir(parents=True, exist_ok=True)
        if path.is_file() and (known := path.read_text(encoding="utf-8")) != drawn:
            parser.error(f"{given.folder} has the data of {known}: give these options, or another folder")
        write(path, drawn)
    except ConfigError as error:
        parser.error(str(error))
    except (OSError, DataError) as error:
        parser.error(f"{error}: give another folder")
    return Study(**vars(given))


def write(path: Path, text: str) -> None:
    """Writes a file, complete or not at all."""
    write_atomically(path, lambda name: Path(name).write_text(text, encoding="utf-8"))


def commit() -> str | None:
    """Returns the commit of the checkout that has this script, with -dirty if files are changed. None: no checkout."""
    words = ("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None  # git is not installed


if __name__ == "__main__":
    main()
