"""Options of the cluster for which benchmarks predict times, none of which is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from clipx.bench.spec import BenchSpec
from clipx.config.lazy_torch import torch
from clipx.errors import require
from clipx.model.flops import ForwardFlops
from clipx.model.spec import ModelSpec
from clipx.plan.alpha_beta import Link
from clipx.plan.step_time import Machine, Model


@dataclass(kw_only=True, slots=True)
class AssumedCluster(BenchSpec):
    """Base class of the options of benchmarks that predict times on clusters: nodes of eight H100 or similar GPUs with
    a 400 Gbit/s adapter each, unless the options say otherwise."""

    gpus: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128, 256, 512, 1024])
    """Numbers of GPUs to predict for. Each is a multiple of `gpus_per_node`, or less than one node."""

    gpus_per_node: int = 8
    """Assumed number of GPUs in each node. At least 1."""

    within_us: float = 3.0
    """Assumed latency from GPU to GPU within a node, in microseconds. Above 0."""

    within_gbs: float = 300.0
    """Assumed bandwidth of a GPU within a node, in GB/s in one direction. Above 0. The default is two thirds of the 450
    of NVLink."""

    between_us: float = 10.0
    """Assumed latency between nodes, in microseconds. Above 0."""

    between_gbs: float = 40.0
    """Assumed bandwidth of a GPU's network adapter, in GB/s in one direction. Above 0. The default is four fifths of
    400 Gbit/s."""

    tflops: float = 400.0
    """Assumed TFLOP/s that the towers reach in bf16. Above 0. The default is two fifths of the 989 of an H100."""

    loss_tflops: float = 30.0
    """Assumed TFLOP/s that the loss reaches in float32. Above 0. The default is nearly half of the 67 of an H100."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("gpus_per_node")
        for key in ("within_us", "within_gbs", "between_us", "between_gbs", "tflops", "loss_tflops"):
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)} must be above 0")
        require(bool(self.gpus), "gpus=[] is empty: give at least one, gpus=[8]")
        for gpus in self.gpus:
            require(
                gpus >= 1 and (gpus % self.gpus_per_node == 0 or gpus < self.gpus_per_node),
                f"gpus={self.gpus} contains {gpus}, which must be a multiple of gpus_per_node={self.gpus_per_node}, or "
                "below it",
            )

    def machine(self) -> Machine:
        """Returns the assumed machine."""
        return Machine(
            self.gpus_per_node,
            Link(1e-6 * self.within_us, 1e9 * self.within_gbs),
            Link(1e-6 * self.between_us, 1e9 * self.between_gbs),
            1e12 * self.tflops,
            1e12 * self.loss_tflops,
        )


def model_size(spec: ModelSpec) -> Model:
    """Returns the properties of a model that determine the time of a step. Allocates no weights."""
    from clipx.model.batchnorm import BATCH_NORM
    from clipx.model.clip import parameter_count

    model, flops = spec.build(torch.device("meta"), torch.float32), ForwardFlops.of(spec)
    norms = any(isinstance(module, BATCH_NORM) for module in model.modules())
    buffers = sum(buffer.nbytes for buffer in model.buffers()) if norms else 0  # DDP broadcasts no constants
    return Model(parameter_count(model), flops.image + flops.text, model.embed_dim, buffers)
