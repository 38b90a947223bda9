"""Trains while an adversary kills, freezes, damages and disconnects, and verifies that the results are unchanged.

    python tests/soak/run.py cycles=200 seed=1 [steps=240] [folder=FOLDER]

A cycle is one start of `clipx.train … resume=auto` and one fault. The cycles of a round continue one run until it is
finished; then all its files are compared with those of an undisturbed run, and the next round begins a new run. In
every other round all starts have the same number of ranks, and then all bits are compared.

The seed chooses faults, ranks and times as numbers of steps; the effect of a fault depends on the machine. Prints a
line for each cycle, and one line of JSON. Exits with 1 at the first cycle that is not survived, and keeps its folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.processes import free_ports
from helpers.runs import tensors, untimed_rows
from helpers.s3_server import KEY, SECRET, VENV, FaultyProxy, admin, install, serving
from soak.adversary import FAULTS, Fault, Scene
from soak.attempt import BATCH, SAMPLES, Attempt, Note, Notes, Unexpected

from clipx.errors import Exit
from clipx.trainer import rng

WORLDS = (1, 2, 3)
CLOSE = 1e-5  # tolerance for other orders of summation in 64 bits; they differ by 1e-12 after 240 steps
# State of Python's generator, which comes first: botocore draws the delay before a repeated request from it.
PYTHON_RNG = rng._PLAIN.fields["numpy"][1]
# drawn on each rank: only in rounds with a fixed number of ranks
DROPOUT = ("+model.image.options.proj_drop_rate=0.1",)


@dataclass(kw_only=True)
class Soak:
    """The rounds described above in `folder`, through `proxy` to the empty `bucket` of the server at `endpoint`."""

    folder: Path
    endpoint: str
    proxy: FaultyProxy
    bucket: str
    cycles: int
    seed: int
    steps: int = 240
    a_round: int = 8  # cycles with faults in a round; the run may finish earlier

    survived: int = 0
    restarts: int = 0
    rounds: int = 0
    by_fault: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._straight: dict[int, Path] = {}

    def run(self) -> None:
        """Runs all rounds. Raises Unexpected at the first cycle, or round, that is not survived."""
        while self.survived < self.cycles:
            worlds = [self.rng.choice(WORLDS)] if self.rounds % 2 == 0 else list(WORLDS)
            round_ = Round(self, self.rounds, worlds)
            round_.run()
            self.rounds += 1

    def summary(self) -> dict[str, Any]:
        return {
            "cycles": self.by_fault.total(),
            "survived": self.survived,
            "by_fault": dict(self.by_fault.most_common()),
            "restarts": self.restarts,
            "rounds": self.rounds,
            "seed": self.seed,
        }

    def straight(self, world: int, options: tuple[str, ...]) -> Path:
        """Returns the run directory of an undisturbed training."""
        name = f"straight-{world}{'-dropout' if options == DROPOUT else ''}"
        run_dir = self.folder / name / "run"
        if not run_dir.exists():
            attempt = Attempt(
                run_dir, Notes(run_dir.with_name("notes")), 0, world if world > 1 else 0, self.length(options)
            )
            with ended(attempt):
                code, _ = attempt.end()
            expect(code == Exit.FINISHED, f"the uninterrupted run of {world} ended with {code}: see {attempt.log}")
        return run_dir

    def length(self, options: tuple[str, ...]) -> tuple[str, ...]:
        return (f"duration={self.steps}st", *options)

    def count(self, fault: str, resumed: bool) -> None:
        self.by_fault[fault] += 1
        self.restarts += resumed


class Round:
    """One run, from its first start to its end."""

    def __init__(self, soak: Soak, number: int, worlds: list[int]) -> None:
        self.soak, self.rng, self.worlds = soak, soak.rng, worlds
        self.options = DROPOUT if len(worlds) == 1 else ()
        self.folder = soak.folder / f"round-{number}"
        self.run_dir = self.folder / "run"
        self.notes = Notes(self.folder / "notes")
        self.url = f"{soak.bucket}/round-{number}"

    def run(self) -> None:
        for number in range(self.soak.a_round):
            left = self.soak.cycles - self.soak.survived
            if left <= 1 or self.cycle(number, left_alone=False):
                break
        if not self.finished:
            expect(self.cycle(self.soak.a_round, left_alone=True), "left alone, the run was not finished")
        self.compare()

    @property
    def finished(self) -> bool:
        return any(step == self.soak.steps for step in map(_step, (self.run_dir / "checkpoints").glob("step-????????")))

    def cycle(self, number: int, left_alone: bool) -> bool:
        """Runs one start, one fault and one end. Returns True if the run is finished."""
        soak, rng, start = self.soak, self.rng, time.monotonic()
        world = rng.choice(self.worlds)
        scene = Scene(
            rng,
            soak.proxy,
            self.run_dir,
            self.remote,
            ranks=world if world > 1 or rng.random() < 0.2 else 0,
            workers=rng.randint(0, 1),
            calm_steps=rng.randint(1, 2 * soak.steps // soak.a_round),
        )
        fault = FAULTS[-1] if left_alone else self.choose(scene)
        soak.count(fault.name, number > 0)
        fault.before(scene)
        here, there = max(map(_step, scene.here()), default=0), max(self.remote(), default=0)
        attempt = self.start(scene, fault, number)
        try:
            with ended(attempt):
                fault.during(scene, attempt)
                if attempt.wait_for_steps(scene.calm_steps):
                    fault.after(scene, attempt)
                code, ranks = attempt.end()
        finally:
            soak.proxy.set("up")
        told = f"{code}{f' of {ranks}' if ranks else ''}"
        try:
            self.judge(scene, attempt, code, ranks, here, there)
        except Unexpected as error:
            raise Unexpected(
                f"{error}; {fault.name} ({', '.join(scene.said)}) ended with {told}: {attempt.log}"
            ) from None
        soak.survived += 1
        how = f"{scene.ranks} ranks" if scene.ranks else "1 process"
        print(
            f"cycle {soak.survived:4} round {soak.rounds} {how:9} {scene.workers} workers  step {max(here, there):3} to "
            f"{attempt.step or max(here, there):3}  {fault.name} ({', '.join(scene.said) or 'left alone'}), exit {told}, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
        return self.finished

    def choose(self, scene: Scene) -> Fault:
        """Returns one of the least used faults that are possible now."""
        possible = [fault for fault in FAULTS[:-1] if fault.needs(scene)]
        least = min(self.soak.by_fault[fault.name] for fault in possible)
        return self.rng.choice([fault for fault in possible if self.soak.by_fault[fault.name] == least])

    def start(self, scene: Scene, fault: Fault, number: int) -> Attempt:
        own = (f"data.workers={scene.workers}", f"checkpoint.remote={self.url}", "checkpoint.sync_timeout_s=60")
        overrides = (*self.soak.length(self.options), *own, *fault.options)
        return Attempt(self.run_dir, self.notes, number, scene.ranks, overrides)

    def remote(self) -> list[int]:
        """Returns the steps of the checkpoints at the URL, bypassing the proxy."""
        found = admin(self.soak.endpoint).glob(f"{self.url}/**/MANIFEST.json")
        return [_step(Path(name).parent) for name in found]

    def judge(self, scene: Scene, attempt: Attempt, code: int, ranks: list[int], here: int, there: int) -> None:
        """Verifies the attempt.

        It must begin at the right step, end with an allowed code, and leave the files that it reported.
        """
        allowed = scene.codes if ranks else scene.codes | scene.launcher_codes
        for one in ranks or [code]:
            expect(one in allowed, f"exit code {one}, which is none of {sorted(map(int, allowed))}")
        made = self.notes.steps(attempt.number)
        if made:
            first, last = made[0] - 1, made[-1]
            expect(
                here <= first <= max(here, there),
                f"began after step {first}; there were {here} here, {there} at the URL",
            )
            if not any(word.startswith("S3") for word in scene.said):
                expect(first == max(here, there), f"began after step {first}; {there} was at the URL")
        newest = max(map(_step, scene.here()), default=0)
        if made and Exit.REQUEUE in (ranks or [code]):
            expect(newest == last, f"said that it saved after step {last}; the newest checkpoint is of {newest}")
        if code == Exit.FINISHED and not scene.ranks:
            expect(newest == self.soak.steps, f"said that it finished; the newest checkpoint is of step {newest}")
        if {code, *ranks} <= {Exit.FINISHED, Exit.REQUEUE}:
            expect(not (self.run_dir / "run.lock").exists(), "left run.lock")

    def compare(self) -> None:
        """Compares with the undisturbed run: all tensors, all rows of metrics.jsonl, and the samples of each epoch."""
        same = len(self.worlds) == 1
        straight = self.soak.straight(self.worlds[0], self.options)
        expected, found = tensors(straight, self.soak.steps), tensors(self.run_dir, self.soak.steps)
        for each in (expected, found):
            # else each rank has a different state
            each["rng"] = each["rng"][:, PYTHON_RNG:] if same else each["rng"][:0, :0]
        expect(expected.keys() == found.keys(), f"other tensors: {expected.keys() ^ found.keys()}")
        for name, tensor in expected.items():
            alike = torch.equal(tensor, found[name]) if same else torch.allclose(tensor, found[name], CLOSE, CLOSE)
            expect(alike, f"{self.folder}: {name} is not that of the uninterrupted run")
        compare_rows(untimed_rows(straight), untimed_rows(self.run_dir), 0 if same else CLOSE)
        check_samples(list(self.notes.read()), self.soak.steps)
        how = "bit for bit" if same else f"within {CLOSE:g}"
        print(f"round {self.soak.rounds}: as the uninterrupted run {how}, every sample once an epoch", flush=True)


@contextlib.contextmanager
def ended(attempt: Attempt) -> Iterator[None]:
    """Yields an attempt, and kills all its processes at the end."""
    try:
        yield
    finally:
        attempt.destroy()


def expect(right: bool, message: str) -> None:
    if not right:
        raise Unexpected(message)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def compare_rows(expected: list[dict[str, float]], found: list[dict[str, float]], tolerance: float) -> None:
    expect(len(expected) == len(found), f"metrics.jsonl has {len(found)} rows, not {len(expected)}")
    for one, other in zip(expected, found, strict=True):
        alike = one.keys() == other.keys() and all(
            math.isclose(one[key], other[key], rel_tol=tolerance, abs_tol=tolerance) for key in one
        )
        expect(alike, f"metrics.jsonl has {other}, not {one}")


def check_samples(notes: list[Note], steps: int) -> None:
    """Verifies that every epoch has each sample once, and that repeated steps took the same samples as before."""
    made: Mapping[tuple[int, int], dict[int, Note]] = defaultdict(dict)
    for note in notes:
        made[note.step, note.attempt][note.rank] = note
    taken: dict[int, list[int]] = {}
    for (step, attempt), ranks in sorted(made.items()):
        if len(ranks) < next(iter(ranks.values())).world:
            continue  # a rank ended within the step: a later attempt repeated it
        samples = [sample for rank in sorted(ranks) for sample in ranks[rank].samples]
        expect(taken.setdefault(step, samples) == samples, f"step {step} took other samples in attempt {attempt}")
    expect(list(taken) == list(range(1, steps + 1)), "not every step was made")
    stream = [sample for step in taken for sample in taken[step]]
    expect(len(stream) == steps * BATCH, "a step took too many or too few samples")
    for start in range(0, len(stream), SAMPLES):
        epoch = stream[start : start + SAMPLES]
        expect(len(set(epoch)) == len(epoch), f"a sample came twice in epoch {start // SAMPLES}")
        expect(len(epoch) < SAMPLES or set(epoch) == set(range(SAMPLES)), f"epoch {start // SAMPLES} is not whole")


# ---------------------------------------------------------------------------------------------- command line


def main(arguments: list[str]) -> int:
    given = dict(argument.split("=", 1) for argument in arguments)
    folder = Path(given.pop("folder", "") or tempfile.mkdtemp(prefix="clipx-soak-")).resolve()
    numbers = {"cycles": 100, "seed": 0, "steps": 240} | {key: int(value) for key, value in given.items()}
    os.environ.setdefault("CLIPX_CACHE", str(folder / "cache"))
    install(VENV)
    with serving(VENV, folder / "s3", free_ports(4)) as endpoint:
        proxy = FaultyProxy(int(endpoint.rpartition(":")[2]))
        place = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": proxy.endpoint}
        os.environ.update(place, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
        admin(endpoint).mkdir("soak")
        soak = Soak(folder=folder, endpoint=endpoint, proxy=proxy, bucket="s3://soak", **numbers)
        failed = ""
        try:
            soak.run()
        except Unexpected as error:
            failed = str(error)
            print(f"not survived: {failed}", flush=True)
        proxy.close()
    print(json.dumps(soak.summary()))
    if failed:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
