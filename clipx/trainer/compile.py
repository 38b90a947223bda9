"""Optional torch.compile of the towers' blocks, the loss's tiles and the optimizer's step.

Blocks are compiled one by one, in place: blocks of the same type share one graph, no name in the state_dict changes,
and activation checkpointing, sharding and format conversion work on blocks as without compilation.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx import compat
from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.specs import frozen
from clipx.errors import ConfigError, require, require_effect
from clipx.precision.spec import VOLTA, require_capability

if TYPE_CHECKING:
    from torch import nn

    from clipx.objective.base import Objective


AUTO, TRUE, FALSE = "auto", "true", "false"
# Variants of one function that are compiled: image sizes, numbers of tokens, evaluation, checkpointing of both towers.
RECOMPILE_LIMIT = 64
_ON = "towers != false or objective or optimizer"  # condition under which anything is compiled


def recompile_limit_hits() -> int:
    """Returns how often this process ran a function uncompiled because it had too many variants."""
    if not compat.is_loaded("dynamo_counters"):
        return 0
    counters = compat.dynamo_counters
    return sum(count for reason, count in counters["unimplemented"].items() if "limit exceeded" in reason)


@functools.cache
def _compiled(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Returns torch.compile(function, **options); cached, so that a process compiles each function once."""
    compiled: Callable[..., Any] = torch.compile(function, **dict(options))
    return compiled


class CompileMode(StrEnum):
    """Modes of torch.compile."""

    default = "default"
    max_autotune = "max_autotune"


class Backend(StrEnum):
    """Backends of torch.compile. All but inductor run the captured graphs unchanged, to debug graph capture."""

    inductor = "inductor"
    aot_eager = "aot_eager"
    eager = "eager"


@frozen
class CompileSpec:
    """Options of torch.compile. The first step of each input shape waits for the compiler, seconds to minutes; later
    steps are faster."""

    towers: str = option(AUTO, choices=(AUTO, TRUE, FALSE))
    """Compile each block of the image and the text tower: true, false or auto. auto compiles on cuda only, and not
    where true is an error: without a compiler or triton, or with blocks that torch.compile does not support. The line
    `device` at the start of a run has the choice and its reason."""

    objective: bool = option(False, when="objective.compiles_tiles")
    """Compile the functions that the loss computes on each tile of pairs."""

    optimizer: bool = option(False, when="not optimizer.fused")
    """Compile the optimizer's step, unless it is one fused kernel, as those of adamw and sgd."""

    mode: CompileMode = option(CompileMode.default, when=_ON)
    """Mode of torch.compile. max_autotune: try several kernels for each matrix product, which takes minutes at the
    start of a run; an error if nothing is compiled, as with towers=auto on a CPU."""

    backend: Backend = option(Backend.inductor, when=_ON)
    """Backend of torch.compile. inductor: generate fused kernels; needs a C++ compiler, and triton on cuda. aot_eager
    and eager: run the captured graphs unchanged, to debug graph capture; an error if nothing is compiled."""

    def __post_init__(self) -> None:
        runs = self.mode is CompileMode.default or self.backend is Backend.inductor
        require_effect(runs, f"compile.mode={self.mode}", f"with compile.backend={self.backend}", "remove one of them")

    @property
    def on(self) -> bool:
        """True if anything is compiled, or may be by towers=auto."""
        return self.towers != FALSE or self.objective or self.optimizer

    def _check_effect(self, on: bool, reason: str) -> None:
        usual = {"mode": CompileMode.default, "backend": Backend.inductor}
        for key, default in usual.items():
            fix = "set compile.towers=true, or remove it"
            require_effect(on or getattr(self, key) == default, f"compile.{key}={getattr(self, key)}", reason, fix)

    def on_device(self, device: torch.device, blocks: Mapping[str, nn.Module]) -> tuple[CompileSpec, str]:
        """Returns these options with towers=true or false, and a line for the log about the choice of towers=auto.

        `blocks`: of the towers, by name. Raises ConfigError.
        """
        if self.towers != AUTO:
            self.check_device(device)
            self.check_blocks(blocks)
            return self, ""
        reason = ""
        if device.type == "cuda":
            try:
                return replace(self, towers=TRUE).on_device(device, blocks)[0], "compile.towers=auto chose true"
            except ConfigError as error:
                reason = f", as {str(error).partition(': ')[0]}"
        self.check_device_type(device.type, reason)
        chosen = replace(self, towers=FALSE)
        chosen.check_device(device)
        return chosen, f"compile.towers=auto chose false{reason}"

    def check_device_type(self, device_type: str, reason: str = "") -> None:
        """Raises ConfigError for options without effect because towers=auto compiles nothing on devices of this type.

        `reason`: of that on cuda, as text to append; empty if it does.
        """
        if self.towers == AUTO and (device_type != "cuda" or reason):
            on = self.objective or self.optimizer
            self._check_effect(on, f"with compile.towers=auto, which chose false on {device_type}{reason}")

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError for a device that inductor does not support, and without the compilers that it uses."""
        if not self.on or self.backend is not Backend.inductor:
            return
        compiler = os.environ.get("CXX", "g++")
        require(
            bool(shutil.which(compiler) or shutil.which("clang++")),
            f"compile needs a C++ compiler, and {compiler} is not found: install one, name it in CXX, or remove "
            "compile.*",
        )
        if device.type != "cuda":
            return
        require(
            importlib.util.find_spec("triton") is not None,
            "compile needs triton on cuda, which is not installed: pip install triton, or remove compile.*",
        )
        header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # of the C code of triton's launcher
        require(
            header.is_file(),
            f"compile needs Python's headers on cuda, and {header} is not found: install them, for Debian's Python "
            "python3-dev, or remove compile.*",
        )
        require_capability(device, VOLTA, "compile", "compile.towers=false")

    def check_blocks(self, blocks: Mapping[str, nn.Module]) -> None:
        """Raises ConfigError for towers without blocks, or with a block that torch.compile does not support."""
        if self.towers != TRUE:
            return
        from clipx.model.activation_checkpointing import check_compiles

        require_effect(bool(blocks), "compile.towers=true", "on towers without blocks")
        for name, block in blocks.items():
            check_compiles(name, block)

    def configure(self, deterministic: bool = False) -> None:
        """Sets the process-wide options of torch.compile. Call it before anything is compiled."""
        if not self.on:
            return
        dynamo, inductor = compat.dynamo_config, compat.inductor_config
        dynamo.optimize_ddp = False  # else each block, smaller than a bucket of DDP, is split further
        dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # on a CPU it says that there is no GPU
        if hasattr(inductor, "deterministic"):
            inductor.deterministic = deterministic  # no choice of kernels by measurement

    def compile_towers(self, blocks: Mapping[str, nn.Module]) -> None:
        """Compiles the blocks in place, with a dynamic number of tokens and a static image size."""
        for name, block in blocks.items() if self.towers == TRUE else ():
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
        if self.mode is CompileMode.max_autotune:
            options["mode"] = "max-autotune-no-cudagraphs"  # a CUDA graph needs one shape, and texts have many
        return options

    def describe(self, blocks: int) -> str:
        """Returns a line for the start of a run; empty if nothing is compiled."""
        parts = [f"{blocks} blocks of the towers"] if self.towers == TRUE else []
        parts += ["the loss's tiles"] if self.objective else []
        parts += ["the optimizer's step"] if self.optimizer else []
        return f"{', '.join(parts)}, with {self.backend}; the first steps wait for compilation" if parts else ""
