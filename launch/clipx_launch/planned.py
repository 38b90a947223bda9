"""A point that is to be launched: its spec, and what an earlier launch has left of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from clipx.errors import require_effect
from clipx.run.directory import RunDir
from clipx.trainer.start import check_plan
from clipx_launch.chain import command_of
from clipx_launch.options import JobsSpec, LaunchSpec
from clipx_launch.point import Point

Options = TypeVar("Options", bound=LaunchSpec)


@dataclass(slots=True, eq=False)  # compared by identity: lists of a thousand are searched
class Planned:
    """A point and its spec, of a run or of another command. Until it is launched, the point has the job of an earlier
    launch."""

    point: Point
    spec: Any
    after: Point | None = None  # the point that it follows
    other: Point | None = None  # the point of an earlier launch with another configuration
    finished: bool = False  # the earlier launch has finished it
    resumed: bool = False  # by `clipx-sweep resume`, whatever its configuration

    def find_previous(self) -> None:
        """Reads what an earlier launch has left in the folder. Raises ClipxError if it is damaged."""
        before = Point.read(self.point.folder)
        if before is None:
            return
        if not self.resumed and before.content != self.point.content:
            self.other = before
            return
        self.point.job, self.point.task = before.job, before.task
        self.finished = before.done
        if self.point.trains and self.spec.resume == "none":
            self.spec = replace(self.spec, resume="auto")

    @property
    def device(self) -> str:
        """Device that the point asks for. A command without the group distributed computes on the CPU."""
        return str(self.spec.distributed.device) if self.distributed else "cpu"

    @property
    def distributed(self) -> bool:
        """True for a run, and for a command that may have several ranks."""
        return hasattr(self.spec, "distributed")

    @property
    def continues(self) -> bool:
        """True for a command without checkpoints that continues when it is started again."""
        return not self.point.trains and command_of(self.point.command).continues

    @property
    def ready(self) -> bool:
        """True if it follows no other point, or that has finished."""
        return self.after is None or self.after.done

    def options(self, spec: Options) -> Options:
        """Returns the launcher's options of this point: a command that follows a run needs less than the run."""
        return spec.of_command(self.distributed) if self.after is not None and isinstance(spec, JobsSpec) else spec

    def check(self, spec: LaunchSpec) -> None:
        """Raises ClipxError if the point cannot run with the options of the launcher."""
        launcher = self.options(spec)
        if self.distributed:
            launcher.check(self.spec.distributed)
        if self.point.trains:
            check_plan(self.spec, launcher.world)
            RunDir(self.point.folder).claim(self.spec)
            return
        ranks, one = f"hydra.launcher with {launcher.world} ranks", f"on clipx.{self.point.command}, which has one"
        require_effect(self.distributed or launcher.world == 1, ranks, one, "set tasks_per_node and nodes to 1")
        if self.after is None:
            command_of(self.point.command).check(self.spec)
