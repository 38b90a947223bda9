"""Optional torch.compile of the towers' blocks, the loss's tiles and the optimizer's step.

Blocks are compiled one by one, in place: blocks of the same type share one graph, no name in the state_dict changes,
and activation checkpointing, sharding and format conversion work on blocks as without compilation.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
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


# Variants of one function that are compiled: image sizes, numbers of tokens, evaluation, checkpointing of both towers.
RECOMPILE_LIMIT = 64


def recompile_limit_hits() -> int:
    """Returns how often this process ran a function uncompiled because it had too many variants."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return sum(count for reason, count in counters["unimplemented"].items() if "limit exceeded" in reason)


@functools.cache
def _compiled(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Returns torch.compile(function, **options); cached, so that a process compiles each function once."""
    compiled: Callable[..., Any] = torch.compile(function, **dict(options))
    return compiled


class Mode(StrEnum):
    """Modes of torch.compile."""

    default = "default"
    """The default mode of torch.compile."""

    max_autotune = "max_autotune"
    """Tries several kernels for each matrix product, which takes minutes at the start of a run."""


class Backend(StrEnum):
    """Backends of torch.compile. All but inductor run the captured graphs unchanged, to debug graph capture."""

    inductor = "inductor"
    """Generates fused kernels."""

    aot_eager = "aot_eager"
    """Captures the graphs of forward and backward and runs them unchanged."""

    eager = "eager"
    """Captures the graph of forward and runs it unchanged."""


@dataclass(kw_only=True, slots=True)
class CompileSpec:
    """Options of torch.compile. The first step of each input shape waits for the compiler, seconds to minutes; later
    steps are faster."""

    towers: bool = False
    """Compile each block of the image and the text tower."""

    objective: bool = False
    """Compile the functions that the loss computes on each tile of pairs. An error for an objective without tiles."""

    optimizer: bool = False
    """Compile the optimizer's step. An error for an optimizer whose step is one fused kernel, such as adamw and sgd."""

    mode: Mode = Mode.default
    """Mode of torch.compile. max_autotune: try several kernels for each matrix product, which takes minutes at the
    start of a run; needs backend=inductor, and is an error if nothing is compiled."""

    backend: Backend = Backend.inductor
    """Backend of torch.compile. inductor: generate fused kernels; needs a C++ compiler, and triton on cuda. aot_eager
    and eager: run the captured graphs unchanged, to debug graph capture; an error if nothing is compiled."""

    def __post_init__(self) -> None:
        for key, value, usual in (("mode", self.mode, Mode.default), ("backend", self.backend, Backend.inductor)):
            require(
                value == usual or self.on,
                f"compile.{key}={value} has no effect if nothing is compiled: add compile.towers=true, or remove it",
            )
        require(
            self.mode is Mode.default or self.backend is Backend.inductor,
            f"compile.mode={self.mode} has no effect on compile.backend={self.backend}: remove one of them",
        )

    @property
    def on(self) -> bool:
        """True if anything is compiled."""
        return self.towers or self.objective or self.optimizer

    def check(self, objective: ObjectiveSpec, optimizer: OptimizerSpec, deterministic: bool = False) -> None:
        """Raises ConfigError if the objective or the optimizer has nothing to compile, or for kernels selected by time
        in a deterministic run."""
        require(
            not (deterministic and self.mode is Mode.max_autotune),
            "compile.mode=max_autotune selects kernels by their time, so deterministic=true cannot hold: remove one of "
            "them",
        )
        require(
            not self.objective or objective.compiles_tiles,
            f"compile.objective=true has no effect on objective={objective.kind}, which has no tiles to compile: "
            "remove it",
        )
        require(
            not self.optimizer or not optimizer.fused,
            f"compile.optimizer=true has no effect on optimizer={optimizer.kind}, whose step is one fused kernel: "
            "remove it",
        )

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if inductor's compiler or triton is missing."""
        if not self.on or self.backend is not Backend.inductor:
            return
        compiler = os.environ.get("CXX", "g++")
        require(
            bool(shutil.which(compiler) or shutil.which("clang++")),
            f"compile needs a C++ compiler, and {compiler} is not found: install one, name it in CXX, or remove "
            "compile.*",
        )
        require(
            device.type != "cuda" or importlib.util.find_spec("triton") is not None,
            "compile needs triton on cuda, which is not installed: pip install triton, or remove compile.*",
        )

    def configure(self, deterministic: bool = False) -> None:
        """Sets the process-wide options of torch.compile. Call it before anything is compiled."""
        if not self.on:
            return
        import torch._dynamo.config as dynamo
        import torch._inductor.config as inductor

        dynamo.optimize_ddp = False  # else each block, smaller than a bucket of DDP, is split further
        dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
        if hasattr(inductor, "deterministic"):
            inductor.deterministic = deterministic  # no choice of kernels by measurement

    def compile_towers(self, blocks: Mapping[str, nn.Module]) -> None:
        """Compiles the blocks in place, with a dynamic number of tokens and a static image size. Raises ConfigError."""
        if not self.towers:
            return
        from clipx.model.activation_checkpointing import check_compiles

        require(bool(blocks), "compile.towers=true has no effect on towers without blocks: remove it")
        for name, block in blocks.items():
            check_compiles(name, block)
            block.compile(**self._options(dynamic=None if name.startswith("image.") else True))

    def compile_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Compiles the optimizer's step in place. The learning rate is dynamic, since it changes at each step."""
        if self.optimizer:
            optimizer.step = torch.compile(optimizer.step, **self._options(dynamic=None))  # type: ignore[assignment,method-assign]

    def compile_objective(self, objective: Objective) -> None:
        """Compiles the functions that this objective calls on each tile; other objectives are not affected."""
        if self.objective:
            options = tuple(self._options(dynamic=True).items())
            objective.compile_tiles(lambda function: _compiled(function, options))

    def _options(self, dynamic: bool | None) -> dict[str, Any]:
        options: dict[str, Any] = {"backend": str(self.backend), "dynamic": dynamic}
        if self.mode is Mode.max_autotune:
            options["mode"] = "max-autotune-no-cudagraphs"  # a CUDA graph needs one shape, and texts have many
        return options

    def describe(self, blocks: int) -> str:
        """Returns a line for the start of a run; empty if nothing is compiled."""
        parts = [f"{blocks} blocks of the towers"] if self.towers else []
        parts += ["the loss's tiles"] if self.objective else []
        parts += ["the optimizer's step"] if self.optimizer else []
        return f"{', '.join(parts)}, with {self.backend}; the first steps wait for compilation" if parts else ""
