"""Faults of the soak test: each is a function that causes the fault and allows the exit codes that may result."""

from __future__ import annotations

import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from helpers.s3_server import FaultyProxy
from soak.attempt import Attempt, send

from clipx.checkpoint.format import find_damage
from clipx.errors import Exit
from clipx.run.signals import SIGNALS

START_S = 10.0  # to the first step, approximately
FILE_LIMIT = 2 << 20  # bytes: the tensors have 5 MB, all other files of a run are smaller


@dataclass
class Scene:
    """One attempt before and after its start, with the adversary's random numbers and access."""

    rng: random.Random
    proxy: FaultyProxy
    run_dir: Path
    remote: Callable[[], list[int]]  # returns the steps of the complete checkpoints at the URL
    ranks: int  # number of torchrun's ranks; 0: plain python
    workers: int
    calm_steps: int  # steps before the fault
    said: list[str] = field(default_factory=list)  # the faults caused, for the log line of this attempt
    # additional exit codes that processes may end with
    codes: set[int] = field(default_factory=lambda: {Exit.FINISHED})
    # exit codes of torchrun alone, where it reports none of its ranks
    launcher_codes: set[int] = field(default_factory=set)

    @property
    def world(self) -> int:
        return max(self.ranks, 1)

    def say(self, text: str) -> None:
        self.said.append(text)

    def here(self) -> list[Path]:
        """Returns the complete checkpoints on disk, newest first."""
        found = (path for path in (self.run_dir / "checkpoints").glob("step-????????") if find_damage(path) is None)
        return sorted(found, reverse=True)

    def allow(self, *codes: int) -> None:
        self.codes.update(codes)

    def steps(self, most: int) -> int:
        return self.rng.randint(1, most)


@dataclass(frozen=True)
class Fault:
    """Actions `before` the start, `during` it, and `after` some steps.

    `needs` returns True if the fault is possible now.
    """

    name: str
    needs: Callable[[Scene], bool] = lambda scene: True
    before: Callable[[Scene], None] = lambda scene: None
    during: Callable[[Scene, Attempt], None] = lambda scene, attempt: None
    after: Callable[[Scene, Attempt], None] = lambda scene, attempt: end_somehow(scene, attempt)
    options: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------- ends of a run


def end_somehow(scene: Scene, attempt: Attempt) -> None:
    """Ends the run by a signal that saves, or by SIGKILL."""
    (stop if scene.rng.random() < 0.6 else kill)(scene, attempt)


def kill(scene: Scene, attempt: Attempt) -> None:
    """Kills the process of one rank."""
    rank = scene.rng.randrange(scene.world)
    _kill(scene, attempt.rank_pids()[rank], f"rank {rank} killed")


def _kill(scene: Scene, pid: int, what: str) -> None:
    scene.say(what)
    scene.allow(-signal.SIGKILL)
    if scene.world > 1:
        # exit codes of the other ranks; torchrun ends the remaining ones
        scene.allow(Exit.FAILED, -signal.SIGTERM, -signal.SIGABRT)
    send(pid, signal.SIGKILL)


def stop(scene: Scene, attempt: Attempt) -> None:
    """Sends a signal to the started process, to all ranks, or to one rank."""
    number = scene.rng.choice(SIGNALS)
    pids = attempt.rank_pids()
    whom = scene.rng.choice(("the launcher", "all ranks", "one rank")) if scene.ranks else "the process"
    targets = {"the launcher": [attempt.process.pid], "one rank": [scene.rng.choice(pids)]}.get(whom, pids)
    scene.say(f"{number.name} to {whom}")
    scene.allow(Exit.REQUEUE, Exit.ABORTED, -number)
    if scene.ranks:
        scene.allow(-signal.SIGTERM)  # from torchrun, to ranks that are ending
    if whom == "the launcher":
        scene.launcher_codes.add(Exit.FAILED)  # torchrun of torch 2.14 raises a SignalException
    for pid in targets:
        send(pid, number)


def end_early(scene: Scene, attempt: Attempt) -> None:
    """Sends a signal to all processes at any time of the start, as a scheduler ends a job."""
    number = scene.rng.choice((*SIGNALS, signal.SIGKILL))
    attempt.wait_s(scene.rng.uniform(0, START_S))
    scene.say(f"{number.name} to all processes after step {attempt.step}")
    scene.allow(Exit.REQUEUE, Exit.ABORTED, -number, -signal.SIGTERM)
    if scene.ranks:
        scene.allow(Exit.FAILED)  # from torchrun, whose ranks ended at different places
    for pid in attempt.alive():
        send(pid, number)


def stop_twice(scene: Scene, attempt: Attempt) -> None:
    """Sends the second signal during the save after the first, or later."""
    stop(scene, attempt)
    attempt.wait_s(scene.rng.uniform(0, 1.5))
    if not attempt.over:
        stop(scene, attempt)


def kill_soon(scene: Scene, attempt: Attempt) -> None:
    """Sends SIGKILL during the save that a signal started."""
    stop(scene, attempt)
    attempt.wait_s(scene.rng.uniform(0, 0.3))
    kill(scene, attempt)


def kill_loader(scene: Scene, attempt: Attempt) -> None:
    pids = attempt.loader_pids()
    if not pids:  # the run is ending
        return
    scene.allow(Exit.FAILED)
    _kill(scene, scene.rng.choice(pids), "a loader process killed")


def kill_launcher(scene: Scene, attempt: Attempt) -> None:
    """Kills torchrun. Its ranks end by themselves."""
    _kill(scene, attempt.process.pid, "torchrun killed")


def freeze(scene: Scene, attempt: Attempt) -> None:
    """Freezes a rank that others wait for, or a loader process: the watchdog ends the waiting processes."""
    pids, what = (attempt.rank_pids(), "a rank") if scene.world > 1 else (attempt.loader_pids(), "a loader process")
    if not pids:
        return
    scene.say(f"{what} stopped")
    scene.allow(Exit.WATCHDOG, Exit.FAILED, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT)
    send(scene.rng.choice(pids), signal.SIGSTOP)
    attempt.end()


def fill_disk(scene: Scene, attempt: Attempt) -> None:
    """Limits the file size of one rank or all ranks, temporarily or permanently."""
    ranks = attempt.rank_pids()
    pids = ranks if scene.rng.random() < 0.5 else [scene.rng.choice(ranks)]
    for_good = scene.rng.random() < 0.5
    scene.say(f"no large files for {len(pids)} of {scene.world} {'' if for_good else 'for a while'}".strip())
    scene.allow(Exit.FAILED)
    _limit(pids, FILE_LIMIT)
    attempt.wait_for_steps(scene.calm_steps + scene.steps(30))
    if not for_good:
        _limit(pids, resource.RLIM_INFINITY)
        attempt.wait_for_steps(scene.calm_steps + 30 + scene.steps(20))
    end_somehow(scene, attempt)


def _limit(pids: list[int], size: int) -> None:
    for pid in pids:
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        except ProcessLookupError:
            return


# ------------------------------------------------------------------------------------------- storage and files

_OUTAGES = (("down", 0), ("hang", 0), ("cut", 2_000), ("slow", 0.3), ("some", 3), ("status", 503))


def _break_storage(scene: Scene) -> None:
    mode, amount = scene.rng.choice(_OUTAGES)
    scene.say(f"S3 {mode}")
    scene.proxy.set(mode, amount)


def storage_fails(scene: Scene, attempt: Attempt) -> None:
    """Breaks the storage temporarily, or until after the end."""
    _break_storage(scene)
    attempt.wait_for_steps(scene.calm_steps + scene.steps(30))
    if scene.rng.random() < 0.5:
        scene.proxy.set("up")
        scene.say("S3 up")
        attempt.wait_for_steps(scene.calm_steps + 30 + scene.steps(20))
    else:
        scene.allow(Exit.NOT_SYNCED)
    end_somehow(scene, attempt)


def storage_comes_late(scene: Scene, attempt: Attempt) -> None:
    """Repairs the storage while the run searches its checkpoints, or long after it resumed from the local ones."""
    if scene.rng.random() < 0.5:
        attempt.wait_s(scene.rng.uniform(0, START_S))
        scene.proxy.set("up")
        scene.say("S3 up during the start")
    if not scene.here():
        scene.allow(Exit.FAILED)  # a new run must not start where an old one may exist


def storage_is_back(scene: Scene, attempt: Attempt) -> None:
    scene.proxy.set("up")
    scene.say("S3 up")
    end_somehow(scene, attempt)


def damage(scene: Scene) -> None:
    """Damages a file of the newest local checkpoint: flips a bit, truncates or removes it."""
    files = sorted(path for path in scene.here()[0].iterdir() if path.is_file())
    path = scene.rng.choice(files)
    content = bytearray(path.read_bytes())
    how = scene.rng.choice(("bit flipped", "truncated", "removed"))
    scene.say(f"{path.parent.name}/{path.name} {how}")
    if how == "removed":
        path.unlink()
        return
    if how == "bit flipped":
        content[scene.rng.randrange(len(content))] ^= 1 << scene.rng.randrange(8)
    else:
        del content[scene.rng.randrange(len(content)) :]
    path.write_bytes(content)


def move(scene: Scene) -> None:
    """Moves the run to a machine without its files."""
    shutil.rmtree(scene.run_dir)
    scene.say("on another machine")


FAULTS = (
    Fault("kill", after=kill),
    Fault("kill a rank of torchrun", lambda scene: scene.ranks > 1, after=kill),
    Fault("kill torchrun", lambda scene: scene.ranks > 0, after=kill_launcher),
    Fault("kill a loader process", lambda scene: scene.workers > 0, after=kill_loader),
    Fault("stop", after=stop),
    Fault("end early", during=end_early, after=lambda scene, attempt: None),
    Fault("stop twice", after=stop_twice),
    Fault("kill while stopping", after=kill_soon),
    Fault(
        "freeze",
        lambda scene: scene.world > 1 or scene.workers > 0,
        after=freeze,
        options=("distributed.watchdog_s=10",),
    ),
    Fault("storage", after=storage_fails, options=("checkpoint.sync_timeout_s=10",)),
    Fault("storage at the start", before=_break_storage, during=storage_comes_late, after=storage_is_back),
    Fault("damage", lambda scene: len(scene.here()) > 1 or bool(scene.here() and scene.remote()), before=damage),
    Fault("another machine", lambda scene: bool(scene.remote()), before=move),
    Fault("disk", after=fill_disk),
    Fault("none", after=lambda scene, attempt: None),
)
