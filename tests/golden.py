"""Comparison of the present tree with an earlier commit, bit for bit: weights, metrics and a job script of short runs.

    python tests/golden.py 7d9b7b4                               # all rows
    python tests/golden.py HEAD --row coca --row lora            # these rows, and those that they need
    python tests/golden.py HEAD --changed coca --keep /tmp/runs  # coca is changed on purpose; the outputs are kept

A worktree of the commit and a copy of the present tree, uncommitted changes included, run the same rows side by side
with this interpreter, on the CPU, with one thread in each process. Of a run, all tensors of the newest checkpoint and
all rows of metrics.jsonl are compared, except columns that depend on the clock or the machine; of a job script, its
lines. Exit code: 0 if all rows are equal, except those of --changed, which must differ; 1 otherwise; 2 for invalid
arguments. A row that needs a changed row is changed, too.

The commands of a row are those of BASE's tests/golden.py, if it has a row of that name: each tree runs in its own
vocabulary. Names of tensors and metrics that were changed on purpose are entered in RENAMED, the last parts of those of
metrics that were added on purpose in ADDED.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # helpers import the clipx of this tree, whatever the environment has installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.packages import entry_points, write_metadata
from helpers.runs import OF_THE_MACHINE
from safetensors import safe_open

from clipx.config.lazy_torch import torch

RENAMED: dict[str, str] = {}  # {name of a tensor or a metric in BASE: its name now}
ADDED = ("samples",)
ROOT = Path(__file__).resolve().parents[1]
METRICS = "metrics.jsonl"
SHOWN = 5  # differences of a row


@dataclass(frozen=True)
class Row:
    """Commands that run one after the other in a folder. BASE's are read as JSON: a new field needs a default."""

    commands: Sequence[str]
    run: str = ""  # run directory that is compared; empty: the output of the last command
    needs: Sequence[str] = ()  # rows that run before


TRAIN = "python -m clipx.train"
DATA = "data.samples=96 data.held_out_samples=24 data.batch_size=32 data.workers=0 schedule.warmup=2st"
SMALL = f"{TRAIN} {DATA} logger=[] report=false evaluator=[zeroshot,retrieval] log_every=1st"
VIT = (
    "model.image.timm=vit_xsmall_patch16_clip_224 model.text.width=16 model.text.heads=2 "
    "model.image.options={patch_size:16,embed_dim:64,depth:2,num_heads:2}"
)
FASTCLIP = (
    f"python -m torch.distributed.run --standalone --nproc-per-node=2 -m clipx.train {DATA} {VIT} distributed=cpu "
    "objective=fastclip_v3 objective.rho=2 data.micro_batches=2 evaluator=[retrieval] evaluator.retrieval.every=1st "
    "logger=[] duration=5st log_every=3st run_dir=fastclip resume=auto"
)
# A recall cannot improve by 2: the run stops at its second evaluation, within an epoch and an interval of log_every.
STOP = "early_stopping.metric=retrieval/image_to_text/recall@1 early_stopping.patience=1 early_stopping.min_delta=2"
STOPPED = "test -d fastclip/checkpoints/step-00000002 -a ! -d fastclip/checkpoints/step-00000005"
STAGES = "{until:2st,image_size:32,batch_size:48,lr_scale:1.4,patch_dropout:0.5},{until:4st,patch_dropout:0.25},{}"
VIEWS = "data.crop_scale=[0.4,1.0] data.augment.flip=0.5"
EMBED = f"python -m clipx.embed run=stages out=views views=2 data=shapes data.samples=96 data.workers=0 {VIEWS}"
STUDENT = f"{SMALL} {VIEWS} objective=distillation teacher.embeddings=views duration=4st run_dir=distillation"
LORA = "model.weights=stages model.image.lora={rank:3,dropout:0.2,dora:true} model.text.lora.rank=2 duration=4st"
SLURM = (
    "hydra/launcher=clipx_slurm hydra.launcher={dry_run:true,partition:gpu,nodes:2,tasks_per_node:8,timeout_min:2880} "
    "hydra.sweep.dir=sweep seed=0,1 optimizer.lr=1e-3,5e-4"
)
ROWS = {  # a row comes after those that it needs
    "default": Row([f"{TRAIN} duration=40st schedule.warmup=10st run_dir=default"], "default"),
    "fastclip": Row([f"{FASTCLIP} {STOP}", STOPPED, FASTCLIP], "fastclip"),
    "coca": Row([f"{SMALL} model=coca_tiny objective=coca duration=4st run_dir=coca"], "coca"),
    "stages": Row([f"{SMALL} {VIT} stages=[{STAGES}] optimizer.ema_decay=0.9 duration=6st run_dir=stages"], "stages"),
    "distillation": Row([EMBED, STUDENT], "distillation", ["stages"]),
    "lora": Row([f"{SMALL} {VIT} {LORA} run_dir=lora"], "lora", ["stages"]),
    "slurm": Row([f"{TRAIN} -m {SLURM}"]),
}

Values = dict[tuple[str, str], Any]  # {(name, file or row that holds it): tensor, or text}


def read_run(folder: Path) -> Values:
    """Returns the tensors of the newest checkpoint of a run, and its metrics as text. Needs no code of the tree."""
    steps = {path.name.removeprefix("step-"): path for path in folder.glob("checkpoints/step-*")}
    newest = steps[max(filter(str.isdigit, steps), key=int)]  # others are left over or damaged
    values: Values = {("name", "newest checkpoint"): newest.name}
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            values |= {(name, path.name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    for number, line in enumerate((folder / METRICS).read_text().splitlines(), 1):
        row = json.loads(line, parse_float=str, parse_int=str, parse_constant=str)
        values |= {(name, f"{METRICS}:{number}"): str(value) for name, value in row.items()}
    return values


def comparable(values: Values, renamed: Mapping[str, str]) -> Values:
    """Returns the values under their present names, without metrics that depend on the clock or the machine."""
    named: Values = {}
    for (old, place), value in values.items():
        name = renamed.get(old, old)
        if (name, place) in named:
            raise ValueError(f"RENAMED gives the name {name} to two values of {place}: correct it")
        if not (place.startswith(METRICS) and name.rpartition("/")[2] in OF_THE_MACHINE):
            named[name, place] = value
    return named


def without_added(values: Values, earlier: Values) -> Values:
    """Returns the values without the metrics that were added on purpose."""
    return {
        (name, place): value
        for (name, place), value in values.items()
        if (name, place) in earlier or not (place.startswith(METRICS) and name.rpartition("/")[2] in ADDED)
    }


def differences(base: Values, now: Values) -> list[str]:
    """Describes the values that are not equal bit for bit, or that only one side has."""
    found = {key: difference(base.get(key, "missing"), now.get(key, "missing")) for key in base | now}
    return [f"{name} ({place}): {text}" for (name, place), text in found.items() if text]


def difference(base: Any, now: Any) -> str:
    """Describes the difference of two values; an empty string if all bits are equal."""
    kinds = [value if isinstance(value, str) else f"{value.dtype} {list(value.shape)}" for value in (base, now)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} in BASE, now {kinds[1]}"
    if isinstance(base, str):
        return ""
    pair = [value.reshape(-1) for value in (base, now)]
    first, second = (value.view(torch.uint8).reshape(len(value), value.element_size()) for value in pair)
    unequal = (first != second).any(1).nonzero().flatten().tolist()  # as bytes: NaN equals itself, 0 is not -0
    if not unequal:
        return ""
    largest = (pair[0].double() - pair[1].double()).abs().max().item()
    example = "{!r} in BASE, now {!r}".format(*(value[unequal[0]].item() for value in pair))
    return f"{len(unequal)} of {len(first)} numbers, at most by {largest:.3g}; the first is {example}"


def verdict(found: Sequence[str], size: str, changed: bool) -> tuple[bool, list[str]]:
    """Returns whether a row is as expected, and the lines that report it."""
    if not found:
        return not changed, [f"equal ({size})" + (": --changed has no effect, remove it" if changed else "")]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    title = f"differences: {len(found)} ({size}){', changed on purpose' if changed else ''}"
    return changed, [title, *found[:SHOWN], *more]


# Removes the checkout of an editable install from the path: the namespace package hydra_plugins has all folders on it.
SITE = """import os, sys
own = os.environ["PYTHONPATH"].split(os.pathsep)
marks = [os.path.join(up, "pyproject.toml") for up in (".", "..")]
sys.path[:] = [p for p in sys.path if p in own or not any(os.path.isfile(os.path.join(p, mark)) for mark in marks)]
"""
IMPORTED = "import clipx, hydra_plugins as plugins; print(clipx.__file__, *plugins.__path__, sep='\\n')"


class Side:
    """A tree, its rows, and a new folder for its outputs. Raises RuntimeError if Python imports another tree."""

    def __init__(self, name: str, tree: Path, folder: Path) -> None:
        self.name, self.tree, self.folder, self.rows = name, tree, folder, ROWS
        for part in ("runs", "cache", "logs", "site"):
            (folder / part).mkdir(parents=True)
        (folder / "site/sitecustomize.py").write_text(SITE)
        write_metadata(folder / "site", "clipx", entry_points(tree))  # the installed ones may be others
        path = os.pathsep.join(map(str, (folder / "site", tree, tree / "launch")))
        self.env = {**os.environ, "PYTHONPATH": path, "CLIPX_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.env["CUDA_VISIBLE_DEVICES"] = ""
        imported = self._output("-c", IMPORTED).splitlines()
        others = [file for file in imported if not Path(file).is_relative_to(tree)]
        if not all(file.endswith("-packages/hydra_plugins") for file in others):  # those of Hydra's own launchers
            raise RuntimeError(f"{tree} is tested, but {', '.join(others)} is imported: correct the installed clipx")
        if (script := tree / "tests/golden.py").is_file():
            own = json.loads(self._output(str(script), "--rows"))
            self.rows = ROWS | {row: Row(**own[row]) for row in ROWS if row in own}

    def _output(self, *words: str) -> str:
        return subprocess.check_output([sys.executable, *words], cwd=self.folder, env=self.env, text=True)

    def start(self, log: str, command: str) -> subprocess.Popen[bytes]:
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        with (self.folder / f"{log}.out").open("wb") as out, (self.folder / f"{log}.err").open("wb") as err:
            return subprocess.Popen(words, cwd=self.folder / "runs", env=self.env, stdout=out, stderr=err)

    def read(self, name: str) -> Values:
        """Returns what a finished row compares."""
        row = self.rows[name]
        if row.run:
            return read_run(self.folder / "runs" / row.run)
        text = (self.folder / f"logs/{name}-{len(row.commands)}.out").read_text().replace(str(self.tree), "TREE")
        lines = text.replace(str(self.folder), "FOLDER").splitlines()
        return {(f"line {number}", "output"): line for number, line in enumerate(lines, 1)}


def run_row(name: str, sides: Sequence[Side]) -> list[str]:
    """Runs the commands of a row, on all sides at the same time. Returns the first failures."""
    for number, commands in enumerate(zip_longest(*(side.rows[name].commands for side in sides), fillvalue="true"), 1):
        log = f"logs/{name}-{number}"
        started = [side.start(log, command) for side, command in zip(sides, commands, strict=True)]
        try:
            codes = [process.wait() for process in started]
        finally:  # after Ctrl-C they may still run
            for process in started:
                process.terminate()
                process.wait()
        logs = [(side.folder / f"{log}.err").read_text()[-3000:] for side in sides]
        if any(codes):
            return [
                f"{side.name}: exit code {code}\n{x}" for side, code, x in zip(sides, codes, logs, strict=True) if code
            ]
    return []


def compare(names: Sequence[str], base: Side, now: Side, changed: Sequence[str]) -> bool:
    """Runs, compares and reports rows. Returns whether all are as expected."""
    good, unmatched = [], set(RENAMED)
    for name in names:
        began = time.monotonic()
        if failures := run_row(name, (base, now)):
            right, lines = False, ["failed", *failures]
        else:
            old, values = base.read(name), comparable(now.read(name), {})
            unmatched -= {key[0] for key in old}
            tensors = sum(isinstance(value, torch.Tensor) for value in values.values())
            size = f"{tensors} tensors, {len(values) - tensors} {'metrics' if now.rows[name].run else 'lines'}"
            earlier = comparable(old, RENAMED)
            right, lines = verdict(differences(earlier, without_added(values, earlier)), size, name in changed)
        good.append(right)
        print(f"{name:13}{time.monotonic() - began:4.0f} s ", "\n    ".join(lines), flush=True)
    for name in sorted(unmatched):
        print(f"note: RENAMED[{name!r}] matches nothing in BASE")
    print(f"{sum(good)} of {len(good)} rows are as expected")
    return all(good)


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], stdout=subprocess.PIPE, text=True, check=False)


def copy_tree(target: Path) -> None:
    """Copies the present tree, which may be edited while the rows run, without ignored files."""
    for name in git("ls-files", "-z", "-co", "--exclude-standard").stdout.split("\0"):
        if (ROOT / name).is_file():  # else deleted and not committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def with_needed(names: Iterable[str]) -> list[str]:
    """Returns the names and those of the rows that they need, in the order of the rows."""
    found = set(names)
    for name in reversed(ROWS):
        found.update(ROWS[name].needs if name in found else ())
    return [name for name in ROWS if name in found]


def invalid(given: argparse.Namespace) -> str:
    """Returns the error of invalid arguments, value, rule and fix in one line; an empty string if they are valid."""
    for name in [*(given.row or ROWS), *given.changed]:
        if name not in ROWS:
            return f"{name} is not a row: choose from {', '.join(ROWS)}"
    for name in sorted({*given.changed} - {*with_needed(given.row or ROWS)}):
        return f"--changed {name} has no effect, the row does not run: add --row {name}, or remove it"
    if given.keep and given.keep.exists():
        return f"--keep {given.keep} exists: give a new folder"
    if git("rev-parse", "--quiet", "--verify", f"{given.base}^{{commit}}").returncode:
        return f"{given.base} is not a commit of {ROOT}: give a hash, a branch or HEAD; fetch it in a shallow clone"
    return ""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="commit with which the present tree is compared")
    parser.add_argument("--row", action="append", metavar="NAME", help="run this row and those it needs; repeatable")
    parser.add_argument("--changed", action="append", metavar="NAME", default=[], help="must differ; repeatable")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for the outputs")
    if list(words) == ["--rows"]:  # of the script of another tree
        print(json.dumps({name: asdict(row) for name, row in ROWS.items()}, indent=1))
        return 0
    given = parser.parse_args(words)
    if error := invalid(given):
        parser.exit(2, f"golden.py: {error}\n")
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        folder = Path(temporary).resolve()
        outputs = given.keep.resolve() if given.keep else folder / "outputs"
        try:
            git("worktree", "add", "--quiet", "--detach", str(folder / "base"), given.base).check_returncode()
            copy_tree(folder / "here")
            base, now = (Side(name, folder / name, outputs / name) for name in ("base", "here"))
            return 0 if compare(with_needed(given.row or ROWS), base, now, given.changed) else 1
        finally:
            git("worktree", "remove", "--force", str(folder / "base"))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT in background jobs
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
