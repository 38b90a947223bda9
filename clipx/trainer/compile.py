"""torch.compile where a run asks for it: the towers' blocks, the loss's tiles, the optimizer's step.

Blocks are compiled one by one, in place: blocks of a kind share one graph, no name in the state_dict changes, and
recomputing, sharding and converting work on blocks as ever.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from clipx.config.lazy_torch import torch
from clipx.errors import require

if TYPE_CHECKING:
    from torch import nn

    from clipx.objective.base import Objective
    from clipx.objective.spec import ObjectiveSpec
    from clipx.optimizer.spec import OptimizerSpec


@functools.cache
def _compiled(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Once in a process."""
    compiled: Callable[..., Any] = torch.compile(function, **dict(options))
    return compiled


class Mode(StrEnum):
    default = "default"
    max_autotune = "max_autotune"  # tries several kernels for each product: minutes at the start of a run


class Backend(StrEnum):
    """What becomes of the graphs. Without inductor they run as they are: for checking what is captured."""

    inductor = "inductor"
    aot_eager = "aot_eager"
    eager = "eager"


@dataclass(kw_only=True, slots=True)
class CompileSpec:
    """The first step of each shape waits for the compiler, seconds to minutes; later ones are faster."""

    towers: bool = False  # each block of the towers
    objective: bool = False  # what the loss does with a tile of the pairs
    optimizer: bool = False  # the step of an optimizer that has no fused kernel
    mode: Mode = Mode.default
    backend: Backend = Backend.inductor

    def __post_init__(self) -> None:
        for key, value, usual in (("mode", self.mode, Mode.default), ("backend", self.backend, Backend.inductor)):
            require(
                value == usual or self.on,
                f"compile.{key}={value} has no effect where nothing is compiled: add compile.towers=true, or "
                "leave it out",
            )
        require(
            self.mode is Mode.default or self.backend is Backend.inductor,
            f"compile.mode={self.mode} has no effect on compile.backend={self.backend}: leave one of them out",
        )

    @property
    def on(self) -> bool:
        return self.towers or self.objective or self.optimizer

    def check(self, objective: ObjectiveSpec, optimizer: OptimizerSpec) -> None:
        """Raises ConfigError where there is nothing to compile."""
        require(
            not self.objective or objective.compiles_tiles,
            f"compile.objective=true has no effect on objective={objective.kind}, which has no tiles to compile: "
            "leave it out",
        )
        require(
            not self.optimizer or not optimizer.fused,
            f"compile.optimizer=true has no effect on optimizer={optimizer.kind}, whose step is one fused kernel: "
            "leave it out",
        )

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError where inductor lacks what it generates code with."""
        if not self.on or self.backend is not Backend.inductor:
            return
        compiler = os.environ.get("CXX", "g++")
        require(
            bool(shutil.which(compiler) or shutil.which("clang++")),
            f"compile needs a C++ compiler, and there is no {compiler}: install one, name it in CXX, or leave "
            "compile.* out",
        )
        require(
            device.type != "cuda" or importlib.util.find_spec("triton") is not None,
            "compile needs triton on cuda, which is not installed: pip install triton, or leave compile.* out",
        )

    def compile_towers(self, blocks: Mapping[str, nn.Module]) -> None:
        """In place. How many tokens the texts of a batch have is left open, images are compiled for their size."""
        if not self.towers:
            return
        from clipx.model.activation_checkpointing import check_compiles

        require(bool(blocks), "compile.towers=true has no effect on towers without blocks: leave it out")
        for name, block in blocks.items():
            check_compiles(name, block)
            block.compile(**self._options(dynamic=None if name.startswith("image.") else True))

    def compile_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """In place. The learning rate is left open: it is another one at each step."""
        if self.optimizer:
            optimizer.step = torch.compile(optimizer.step, **self._options(dynamic=None))  # type: ignore[assignment,method-assign]

    def compile_objective(self, objective: Objective) -> None:
        """Compiles the functions that the objective calls on each tile; another objective keeps its own."""
        if self.objective:
            options = tuple(self._options(dynamic=True).items())
            objective.compile_tiles(lambda function: _compiled(function, options))

    def _options(self, dynamic: bool | None) -> dict[str, Any]:
        options: dict[str, Any] = {"backend": str(self.backend), "dynamic": dynamic}
        if self.mode is Mode.max_autotune:
            options["mode"] = "max-autotune-no-cudagraphs"  # a CUDA graph wants one shape, and texts have many
        return options

    def describe(self, blocks: int) -> str:
        """For the start of a run; nothing where nothing is compiled."""
        parts = [f"{blocks} blocks of the towers"] if self.towers else []
        parts += ["the loss's tiles"] if self.objective else []
        parts += ["the optimizer's step"] if self.optimizer else []
        return f"{', '.join(parts)}, by {self.backend}; the first steps wait for it" if parts else ""
