"""Speed of the loader of the present tree and of an earlier commit, side by side, with the CPU time of each process.

    python tests/loader_race.py c853ee8a                          # 256 and 512 pixels; 1, 2 and 3 loader processes
    python tests/loader_race.py HEAD~5 --sides 256 --workers 2 --rounds 9

Both trees load the same photographs in turn, each time in a new process. Prints for each setting the median rate of
each tree, their ratio with the least and the largest of the rounds, the share of bare decoding in as many processes,
and where the present tree spends its CPU time. No test decides by it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BATCH, BATCHES, SAMPLES, SEED = 256, 12, 4096, 0

# Prints images per second, then the CPU time of an image in this process and in its children, in microseconds.
PROGRAM = f"""
import json, os, resource, sys
import torch
from clipx.bench import pipelines

def main():
    torch.set_num_threads(1)
    kind, folder, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rate = pipelines.CONTESTANTS[kind](None, folder, {BATCH}, workers, {BATCHES}, {SEED})
    print(json.dumps([rate, os.times()[:4]]))

if __name__ == "__main__":
    main()
"""


def measured(tree: Path, kind: str, folder: Path, workers: int) -> float:
    """Returns the images per second of a loader of a tree."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as home:
        program = Path(home, "program.py")  # spawned processes import it
        program.write_text(PROGRAM)
        words = (sys.executable, str(program), kind, str(folder), str(workers))
        done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {tree}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])[0])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Compares the speed of the loader with that of a commit.")
    parser.add_argument("base", metavar="COMMIT")
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run((*git, "add", "-q", "--detach", str(base), given.base), check=True)
        try:
            race(given, base, Path(folder))
        finally:
            subprocess.run((*git, "remove", "--force", str(base)), check=True)


def race(given: argparse.Namespace, base: Path, folder: Path) -> None:
    from clipx.bench import shards

    print(f"{'':24}{'now':>8}{'before':>8}{'ratio':>8}  (rounds){'decoding':>14}{'now':>8}{'before':>8}")
    for side, workers in product(given.sides, given.workers):
        photographs = folder / f"photographs-{side}"
        if not photographs.exists():
            photographs.mkdir()
            shards.write(photographs, SAMPLES, side, SEED)
        now, before, bare = list[float](), list[float](), list[float]()
        for _ in range(given.rounds):
            now.append(measured(ROOT, "clipx", photographs, workers))
            before.append(measured(base, "clipx", photographs, workers))
            bare.append(measured(ROOT, "decode", photographs, workers))
        ratios = [one / other for one, other in zip(now, before, strict=True)]
        rates = [statistics.median(rates) for rates in (now, before, bare)]
        print(
            f"{side} px, {workers} processes{rates[0]:12,.0f}{rates[1]:8,.0f}{statistics.median(ratios):8.2f}"
            f"  ({min(ratios):.2f}-{max(ratios):.2f}){rates[2]:12,.0f}{rates[0] / rates[2]:8.2f}{rates[1] / rates[2]:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
