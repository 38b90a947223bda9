"""`python -m clipx.plan [key=value …]`: predicts what a run needs. Trains and allocates nothing."""

from __future__ import annotations

import json
import sys

from clipx.cli import cli, imports
from clipx.config.registry import complete, frozen, option, register
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec
from clipx.errors import ClipxError, require
from clipx.extra.plan.traffic import objective_traffic
from clipx.model.flops import DEVICES, Device, peak_tflops
from clipx.trainer.continued import composition_base
from clipx.trainer.rules import GroupRule, check_rules
from clipx.trainer.spec import RunSpec

RESERVE_GB = 4.0
"""Part of the memory for the CUDA context, NCCL, workspaces of cuDNN and cuBLAS, and fragmentation, in 1e9 bytes."""

BYTES_PER_SAMPLE = 25e3
"""Bytes of a sample in storage, as of LAION-400M: 10 TB at 256 pixels."""


RULES = (
    GroupRule(
        lambda run: run.model.outputs,
        "model={model.name} returns {found}, whose computation a plan does not count: plan a CLIP model with the same "
        "towers, such as model=vit_b32",
        "model=coca_tiny",
    ),
    GroupRule(
        lambda run: run.unknown,
        f"gpu={{gpu}} is not known: choose from {', '.join(DEVICES)}, or also give {{found}}",
        "gpu=H1000",
    ),
    GroupRule(
        lambda run: run.stages,
        "stages={found}: a plan covers one stage: plan each with its values and with stages=[]",
        "model=vit_b32 'stages=[{until:50%,image_size:96},{}]'",
    ),
    GroupRule(
        lambda run: run.objective.taught and (run.objective.untaught or "infonce"),
        "objective={objective.kind} needs a teacher, whose time and memory a plan does not count: plan with "
        "objective={found} and add its forward (docs/guides/distillation.md)",
        "objective=distillation teacher.weights=x",
    ),
    GroupRule(
        lambda run: not isinstance(run.distributed, DdpSpec | FsdpSpec),
        "distributed={distributed.kind} has no model of traffic and memory here: plan with ddp or fsdp",
        "distributed=mesh",
    ),
    GroupRule(
        lambda run: run.text_tokens is not None and run.text_tokens > run.model.text.context_length,
        "text_tokens={text_tokens} is above model.text.context_length={model.text.context_length}: give less",
        "text_tokens=300",
    ),
    GroupRule(
        lambda run: run.samples is not None and run.samples < run.data.batch_size,
        "data.batch_size={data.batch_size} is larger than the data set of samples={samples}: lower it, or give "
        "samples=N of the whole data set",
        "samples=100 data.batch_size=256",
    ),
    GroupRule(
        lambda run: run.samples is None and run.objective.indexed,
        "objective={objective.kind} stores state for each sample, and the number of samples of data={data.name} is "
        "unknown: give samples=N",
        "objective=fastclip_v3 data=csv",
    ),
)
"""Rules of a plan, in addition to those of a run."""


@register("")
@frozen
class PlanSpec(RunSpec):
    """A run, and the machine for which it is planned. `device_peak_tflops` is an option of the run: null uses the peak
    of `gpu`."""

    kind: str = "plan"
    """Name of this command in the registry. Do not change it."""

    json: bool = False
    """Prints one line of JSON on stdout instead of tables."""

    ranks: int | None = option(None, ge=1, hint="null finds the number")
    """Number of devices. null: the smallest of 1, 2, 4, … whose memory is sufficient."""

    samples: int | None = None
    """Number of samples in the data set, at least `data.batch_size`. null: the number of the data, if it is published,
    set, or counted in a table or folder. Required by objectives with state for each sample if there is none."""

    gpu: str = "H100"
    """Device whose data sheet is used: B200, H200, "H100 PCIe", H100, A100, L40S or A10. Another name needs
    device_peak_tflops, device_memory_gb and mfu."""

    device_memory_gb: float | None = option(None, gt=RESERVE_GB, unit="GB")
    """Memory of a device in GB of 1e9 bytes, of which 4 are a reserve. null: that of the data sheet, 80 for an A100."""

    mfu: float | None = option(None, gt=0, le=1, hint="0.4 is usual for large models, null uses published runs")
    """Share of the peak that the towers reach in the FLOPs that they compute; train/mfu of a run without
    recomputation and micro-batches. null: the range of published runs with this model on this device, or with others
    if there is none. 0.4 is what large models reach at best."""

    text_tokens: float | None = option(None, ge=2, when="model.text.packed")
    """Mean number of tokens of a caption, start and end tokens included, at most model.text.context_length. null: 20,
    at most the context length; the context length if texts are not packed."""

    price_per_gpu_hour: float | None = option(None, gt=0)
    """Price of a GPU-hour in any currency. null: no cost is printed."""

    def __post_init__(self) -> None:
        RunSpec.__post_init__(self)
        complete(self, precision=self.precision.resolve(bf16=True))  # all GPUs of the data sheets have bfloat16
        self.data.check_ranks(self.ranks or 1)
        self._check_samples()
        check_rules(self, RULES)
        objective_traffic(self.objective)

    @property
    def unknown(self) -> str:
        """Keys that a plan needs of a GPU that has no data sheet here, and that are not given."""
        needed = ("device_peak_tflops", "device_memory_gb", "mfu")
        return "" if self.gpu in DEVICES else ", ".join(key for key in needed if getattr(self, key) is None)

    def _check_samples(self) -> None:
        """Counts the samples of the data if the number is not given. Raises ConfigError or DataError."""
        if self.samples is None:
            try:
                complete(self, samples=self.data.count())
            except ClipxError as error:
                raise type(error)(f"{error}; or give samples=N") from error

    @property
    def device(self) -> Device:
        """Data sheet of the device. Raises ConfigError if it is unknown."""
        require(self.gpu in DEVICES, f"gpu={self.gpu} is not known: choose from {', '.join(DEVICES)}")
        return DEVICES[self.gpu]

    @property
    def memory_gb(self) -> float:
        """Memory of a device in GB."""
        return self.device.memory if self.device_memory_gb is None else self.device_memory_gb

    @property
    def texts(self) -> int:
        """Number of texts of a sample."""
        return self.data.captions_per_step

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a text that are computed."""
        length = float(self.model.text.context_length)
        if not self.model.text.packed:
            return length
        return min(20.0, length) if self.text_tokens is None else self.text_tokens

    @property
    def peak_tflops(self) -> float:
        """Peak TFLOP/s of one device. Raises ConfigError if unknown."""
        peak = self.device_peak_tflops or peak_tflops(self.gpu, self.precision)
        require(
            peak is not None,
            f"the peak of gpu={self.gpu} with precision={self.precision.kind} is unknown: give device_peak_tflops",
        )
        assert peak is not None
        return peak


def show(spec: PlanSpec) -> None:
    """Computes the plan and prints it as tables or JSON."""
    with imports():
        from clipx.extra.plan.estimate import plan
        from clipx.extra.plan.show import as_dict, tables
        from clipx.report.console import stdout_console

    console = stdout_console(quiet=spec.json)
    found = plan(spec, console.print)
    for table in tables(found):
        console.print(table)
    if spec.json:
        print(json.dumps(as_dict(found)))


def main() -> None:
    """Runs Hydra's main. A key may have the name of the command before it: plan.mfu=0.4."""
    sys.argv[1:] = [word.removeprefix("plan.") for word in sys.argv[1:]]
    cli(show, "plan", base=composition_base, prints=True)()


if __name__ == "__main__":
    main()
