"""Plans of the settings in which published models were trained, in one table.

Sources: open_clip's docs/PRETRAINED.md and model cards for models, batches, GPUs and hours; the FastCLIP paper
(arXiv:2407.01445) for the others. 32 epochs of LAION-400M are 12.8e9 samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from clipx.extra.plan import show as shown
from clipx.extra.plan.estimate import Plan, plan
from clipx.extra.plan.spec import PlanSpec
from clipx.report.console import text_table
from clipx.trainer.spec import RunSpec, compose

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Setting:
    """Published training run."""

    name: str
    gpus: int
    batch: int
    options: tuple[str, ...]
    hours: float | None = None  # published duration


_LAION400M = ("data=laion400m", "data.shards=unread.tar", "precision=amp_bf16", "duration=12.8e9sa")
_LAION2B = ("data=laion2b", "data.shards=unread.tar", "precision=amp_bf16", "duration=32e9sa")
_RECOMPUTED = ("model.image.checkpointing=1", "model.text.checkpointing=1")
SETTINGS = (
    Setting("CC3M RN50", 8, 1024, ("experiment=cc3m_rn50_fastclip_v3", "data.shards=unread.tar")),
    Setting("CC12M ViT-B/32", 8, 2048, ("experiment=cc12m_vit_b32_fastclip_v3", "data.shards=unread.tar")),
    Setting("LAION-315M ViT-B/16", 16, 5120, ("experiment=laion315m_vit_b16_fastclip_v3", "data.shards=unread.tar")),
    Setting("LAION-400M ViT-B/32", 128, 32_768, ("model=vit_b32", *_LAION400M), 36),
    Setting("LAION-400M ViT-B/16", 176, 33_792, ("model=vit_b16", *_LAION400M), 61),
    Setting("LAION-400M ViT-L/14", 400, 38_400, ("model=vit_l14", *_LAION400M, *_RECOMPUTED), 127),
    Setting("LAION-2B ViT-B/32", 112, 46_592, ("model=vit_b32", *_LAION2B)),
    Setting("LAION-2B ViT-H/14", 824, 79_104, ("model=vit_h14", *_LAION2B, *_RECOMPUTED)),
    Setting("LAION-2B ViT-H/14", 1024, 79_872, ("model=vit_h14", *_LAION2B, *_RECOMPUTED)),
)


def plans(spec: PlanSpec, log: Callable[[str], None]) -> list[tuple[Setting, Plan]]:
    """Plans each setting on the machine of `spec`."""
    found = []
    for setting in SETTINGS:
        log(f"{setting.name} on {setting.gpus}")
        found.append((setting, plan(_spec(setting, spec), lambda text: None, largest=False)))
    return found


def _spec(setting: Setting, spec: PlanSpec) -> PlanSpec:
    machine = {f.name for f in fields(PlanSpec)} - {f.name for f in fields(RunSpec)} - {"samples", "ranks"}
    given = [f"{key}={value}" for key in sorted(machine) if (value := getattr(spec, key)) is not None]
    size = (f"ranks={setting.gpus}", f"data.batch_size={setting.batch}")
    composed = compose(*setting.options, *size, *given, config_name="plan")
    assert isinstance(composed, PlanSpec)
    return composed


def table(found: list[tuple[Setting, Plan]]) -> Table:
    spec = found[0][1].spec
    title = f"published settings on {spec.gpu}, {spec.memory_gb:g} GB each"
    columns = ("setting", "GPUs", "batch", "per GPU", "Mparams", "GFLOPs", "GB", "fits", "step, ms", "samples/s",
               "GB/s", "hours", "published", "GPU-hours")  # fmt: skip
    return text_table(columns, [_row(setting, one) for setting, one in found], title, right=columns[1:])


def _row(setting: Setting, one: Plan) -> list[str]:
    return [
        setting.name,
        f"{setting.gpus:,}",
        f"{setting.batch:,}",
        f"{one.micro_batch:,}",
        f"{sum(one.parameters.values()) / 1e6:,.0f}",
        f"{one.sample_flops / 1e9:,.1f}",
        f"{one.needed / 1e9:,.1f}",
        "yes" if one.fits else "no",
        shown.span([f"{1e3 * x.seconds:,.0f}" for x in one.predictions]),
        shown.span([f"{x.rate:,.0f}" for x in one.predictions]),
        shown.span([f"{x.rate * one.spec.bytes_per_sample / 1e9:,.2f}" for x in one.predictions]),
        shown.span(["" if x.hours is None else f"{x.hours:,.0f}" for x in one.predictions]),
        "" if setting.hours is None else f"{setting.hours:,.0f}",
        shown.span(["" if x.gpu_hours is None else f"{x.gpu_hours:,.0f}" for x in one.predictions]),
    ]


def as_dict(setting: Setting, one: Plan) -> dict[str, Any]:
    return {"setting": setting.name, "published_hours": setting.hours, **shown.as_dict(one)}
