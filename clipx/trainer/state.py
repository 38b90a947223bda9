"""State of training, except the position in the data: captured for a checkpoint and restored from one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from clipx.checkpoint.format import Checkpoint
from clipx.checkpoint.state import Tensors, add_prefix, load_module, load_optimizer, optimizer_tensors, select_prefix
from clipx.checkpoint.tensors import RankRows
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError
from clipx.model.clip import CLIP
from clipx.objective.base import Objective
from clipx.objective.losses.sample_state import SampleTable
from clipx.trainer.rng import rng_state, seed_all, set_rng_state

if TYPE_CHECKING:
    from clipx.optimizer.master import MasterWeights
    from clipx.trainer.ema import WeightAverage


@dataclass(frozen=True, slots=True)
class TrainState:
    """The stateful objects of training, saved in a checkpoint together."""

    model: CLIP
    average: WeightAverage | None
    objective: Objective
    optimizer: torch.optim.Optimizer
    comm: Comm
    masters: MasterWeights | None = None  # if given, `model` is their master

    def capture(self) -> dict[str, torch.Tensor | RankRows]:
        """Returns the live tensors by name, not copies. `RankRows`: this rank's part of a tensor sharded over ranks."""
        rng = rng_state(self.comm.device)
        return {
            **add_prefix("model", self.model.state_dict()),
            **(add_prefix("average", self.average.state()) if self.average else {}),
            **add_prefix("objective", self.objective.state_dict()),
            **add_prefix("optimizer", optimizer_tensors(self.optimizer)),
            **{f"table/{name}": RankRows(table.rows, table.start) for name, table in self._tables().items()},
            "rng": RankRows(rng[None], self.comm.rank),
        }

    def changed_by_updates(self, captured: Iterable[str]) -> set[str]:
        """Returns the names of captured tensors that change in the optimizer's step or after it, not in the forward
        pass: weights, their average, and the optimizer's state, but neither buffers nor the objective's state."""
        weights = {f"model/{name}" for name, _ in self.model.named_parameters()}
        return {name for name in captured if name in weights or name.startswith(("average/", "optimizer/"))}

    def restore(self, found: Checkpoint, seed: int) -> list[str]:
        """Restores the state from a checkpoint. Returns lines for the log about state that could not be restored.

        `seed`: seed of the random numbers if another number of ranks wrote the checkpoint. Raises CheckpointError if
        the checkpoint does not fit. Collective.
        """
        self.restore_learned(found.tensors)
        self._restore_tables(found)
        return [*self._restore_average(found), *self._restore_rng(found, seed)]

    def restore_learned(self, tensors: Tensors) -> None:
        """Restores weights, the objective's parameters and the optimizer's state. Raises CheckpointError."""
        load_module(self.model, select_prefix("model", tensors), "model")
        load_module(self.objective, select_prefix("objective", tensors), "objective")
        load_optimizer(self.optimizer, select_prefix("optimizer", tensors))
        if self.masters is not None:
            self.masters.copy_weights_to_model()

    def _tables(self) -> dict[str, SampleTable]:
        """Returns the objective's per-sample state by name."""
        return {name: module for name, module in self.objective.named_modules() if isinstance(module, SampleTable)}

    def _restore_tables(self, found: Checkpoint) -> None:
        own = {f"table/{name}": table for name, table in self._tables().items()}
        saved = {name for name in found.sharded_names() if name.startswith("table/")}
        if strange := own.keys() ^ saved:
            names = ", ".join(sorted(name.removeprefix("table/") for name in strange))
            raise CheckpointError(
                f"the checkpoint {found.folder} and this objective differ in their per-sample state ({names}): resume "
                "with the objective of the checkpoint"
            )
        for name, table in own.items():
            found.read_rows(name, RankRows(table.rows, table.start))

    def _restore_average(self, found: Checkpoint) -> list[str]:
        saved = select_prefix("average", found.tensors)
        if self.average is None:
            return ["ignored the checkpoint's average of the weights: optimizer.ema_decay=null"] if saved else []
        if not saved:
            return ["the average of the weights starts at this step: the checkpoint contains none"]
        self.average.restore(saved)
        return []

    def _restore_rng(self, found: Checkpoint, seed: int) -> list[str]:
        world = found.state["world"]
        mine = rng_state(self.comm.device)[None]
        length, on_cpu = found.row_length("rng"), rng_state(torch.device("cpu")).numel()  # a device adds its state
        other_device = world == self.comm.world and length != mine.shape[1] and length >= on_cpu
        if world == self.comm.world and not other_device:
            found.read_rows("rng", RankRows(mine, self.comm.rank))
            try:
                set_rng_state(mine[0], self.comm.device)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{found.folder} holds no valid state of the random numbers ({reason}): restore it"
                ) from None
            return []
        seed_all(seed + self.comm.rank)
        if other_device:
            return [
                f"another type of device than {self.comm.device.type} wrote the checkpoint: reseeded the random numbers"
            ]
        return [f"{world} ranks wrote the checkpoint, {self.comm.world} resume it: reseeded the random numbers"]
