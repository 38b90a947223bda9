"""A small CoCa, images and texts for it, and open_clip's CoCa with the same shape."""

from __future__ import annotations

import torch
from open_clip.coca_model import CoCa as OpenClipCoCa  # type: ignore[import-untyped]
from torch import Tensor

from clipx.extra.coca.model import CoCa
from clipx.extra.coca.spec import CoCaSpec, DecoderSpec
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer
from clipx.model.tower_spec import ImageTowerSpec
from clipx.weights.open_clip import config_of

CPU = torch.device("cpu")
LENGTH = 12
TEXTS = (
    "a photo of a cat",
    "two dogs",
    "",
    "one two three four five six seven eight nine",  # leaves one padding token
    "one two three four five six seven eight nine ten",  # leaves no padding token
    "a text that is cut where the context ends, for it has more than twelve tokens",
)


def small_spec(packed: bool = True, checkpointing: str = "none", quick_gelu: bool = False) -> CoCaSpec:
    options = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
    kept = {"checkpointing": checkpointing}
    return CoCaSpec(
        name="small",
        embed_dim=32,
        quick_gelu=quick_gelu,
        queries=6,
        pool_heads=4,
        image=ImageTowerSpec(timm="vit_base_patch16_clip_224", size=32, options=options, **kept),
        text=ClipTextSpec(context_length=LENGTH, width=32, heads=2, layers=2, packed=packed, **kept),
        decoder=DecoderSpec(heads=4, layers=2, **kept),
    )


def build(seed: int = 0, dtype: torch.dtype = torch.float64, spec: CoCaSpec | None = None) -> CoCa:
    """Builds a CoCa with every parameter moved off its initial value.

    No norm is then the identity and no bias zero.
    """
    torch.manual_seed(seed)
    model = (spec or small_spec()).build(CPU, dtype).eval()
    moved(model)
    return model


@torch.no_grad()
def moved(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def images(count: int = len(TEXTS), size: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def tokens(length: int = LENGTH) -> Tensor:
    return Tokenizer(length)(TEXTS)


def open_clip_twin(spec: CoCaSpec, dtype: torch.dtype) -> OpenClipCoCa:
    """open_clip's CoCa with the shape of `spec`.

    Its last projection is drawn, because open_clip leaves it uninitialised.
    """
    torch.manual_seed(1)
    config = config_of(spec)
    towers = (config[f"{part}_cfg"] for part in ("multimodal", "text", "vision"))
    twin = OpenClipCoCa(spec.embed_dim, *towers, quick_gelu=spec.quick_gelu).to(dtype)
    torch.nn.init.normal_(twin.text_decoder.text_projection, std=spec.text.width**-0.5)  # type: ignore[attr-defined]
    scale = twin.logit_scale.item()
    moved(twin)
    twin.logit_scale.data.fill_(scale)
    return twin.eval()
