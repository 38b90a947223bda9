"""A small model with an optimizer, and gradients for it, shared by the tests of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clipx.config.duration import Length
from clipx.config.registry import CONF_DIR
from clipx.distributed.comm import Comm
from clipx.model.clip import CLIP
from clipx.objective.base import Objective
from clipx.optimizer.groups import parameter_groups, set_learning_rate
from clipx.optimizer.spec import OptimizerSpec
from helpers.runs import compose

CPU, META = torch.device("cpu"), torch.device("meta")
OPTIONS = sorted(path.stem for path in (CONF_DIR / "optimizer").glob("*.yaml"))
# A ResNet, for its kernels and channels_last weights, and a narrow text tower with few words.
NARROW = (
    *("model=tiny", "model.embed_dim=32", "model.text.width=32", "model.text.heads=2"),
    *("model.text.tokenizer=none.json", "model.text.vocabulary=99", "model.text.end_id=2"),
)


class Optimizing:
    """A model, an objective and their optimizer, fed with gradients drawn from the step's number."""

    spec: OptimizerSpec
    model: CLIP
    objective: Objective
    groups: list[dict[str, Any]]
    optimizer: torch.optim.Optimizer

    def __init__(
        self, *overrides: str, device: torch.device = CPU, dtype: torch.dtype = torch.float64, constant: bool = False
    ) -> None:
        """`constant`: the objective's parameters have a separate learning rate, 1e-3."""
        spec = compose(*NARROW, *overrides)
        torch.manual_seed(0)
        self.spec = spec.optimizer
        self.model = spec.model.build(device, dtype)
        self.objective = spec.objective.build(Comm(0, 1, 0, CPU), Length(100, 10, 1000)).to(device, dtype)
        if constant:
            self.objective.constant_lr = 1e-3
        groups = parameter_groups(self.model, self.objective, spec.optimizer)
        self.groups = [dict(group) for group in groups]  # copies: torch adds entries to the groups that it gets
        self.optimizer = spec.optimizer.build(groups)

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for part, module in (("model", self.model), ("objective", self.objective)):
            for name, parameter in module.named_parameters():
                yield f"{part}.{name}", parameter

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named()}

    def group_of(self, name: str) -> dict[str, Any]:
        return next(group for group in self.groups if name in dict(group["params"]))

    def gradients(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randn(p.shape, dtype=p.dtype, generator=generator) for name, p in self.named()}

    def set_gradients(self, number: int) -> None:
        gradients = self.gradients(number)
        for name, p in self.named():
            # same memory layout as autograd's, which kernels rely on
            p.grad = torch.empty_like(p).copy_(gradients[name])

    def step(self, number: int, lr: float) -> None:
        """Takes one step at the scheduled rate `lr`."""
        self.set_gradients(number)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
