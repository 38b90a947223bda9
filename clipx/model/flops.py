"""Floating point operations: count for a model, and data sheets of devices with their peak rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clipx.config.lazy_torch import torch
from clipx.model.spec import ModelSpec
from clipx.precision.spec import PrecisionSpec


@dataclass(frozen=True, slots=True)
class Device:
    """Data sheet of one device of NVIDIA. Rates are dense TFLOP/s, memory is in GB."""

    half: float  # matrix products in bfloat16 and float16
    tf32: float
    fp32: float
    fp64: float
    memory: float


# The first name that is part of a device's name applies.
DEVICES = {
    "B200": Device(2250.0, 1125.0, 75.0, 37.0, 180.0),
    "H200": Device(989.0, 494.0, 67.0, 67.0, 141.0),
    "H100 PCIe": Device(756.0, 378.0, 51.0, 51.0, 80.0),
    "H100": Device(989.0, 494.0, 67.0, 67.0, 80.0),
    "A100": Device(312.0, 156.0, 19.5, 19.5, 80.0),
    "L40S": Device(362.0, 183.0, 91.6, 1.4, 48.0),
    "A10": Device(125.0, 62.5, 31.2, 0.5, 24.0),
}


def peak(device: Device, product_format: str) -> float:
    """Returns the peak TFLOP/s of a device in a `product_format` of the number formats."""
    return {"half": device.half, "tf32": device.tf32, "fp32": device.fp32, "fp64": device.fp64}[product_format]


def peak_tflops(name: str, precision: PrecisionSpec) -> float | None:
    """Returns the peak TFLOP/s of a device by name, in matrix products of this precision. None if unknown."""
    column = precision.product_format
    found = next((device for known, device in DEVICES.items() if known in name), None)
    return None if found is None or column is None else peak(found, column)


def known_peak(precision: PrecisionSpec, device: torch.device, peak: float | None) -> float | None:
    """Returns `peak`, or the peak TFLOP/s of a CUDA device by its name if `peak` is None. None if it is unknown."""
    if peak is None and device.type == "cuda":
        return peak_tflops(torch.cuda.get_device_name(device), precision)
    return peak


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of one sample in the forward pass. A multiplication and an addition count as two."""

    image: int
    text: int  # for the whole context, whatever the length of the text; includes further towers, such as a decoder

    @classmethod
    def count(cls, spec: ModelSpec) -> ForwardFlops:
        """Counts on the meta device. Operations other than matrix products and convolutions, under 1 %, count as 0."""
        from torch.utils.flop_counter import FlopCounterMode

        meta = torch.device("meta")
        # Without gradients: the counter looks for the autograd history of tensors that an attention pool derives from
        # its weights.
        model = spec.build(meta, torch.float32).requires_grad_(False)
        length = spec.text.context_length
        image = model.image.unread(model.image.example(1, meta))
        tokens_1L = torch.empty((1, length), dtype=torch.long, device=meta)
        with torch.no_grad(), FlopCounterMode(display=False) as of_image:
            model.encode_image(image)
        with torch.no_grad(), FlopCounterMode(display=False) as of_both:
            model(image, tokens_1L)
        of_text = of_both.get_total_flops() - of_image.get_total_flops()
        return cls(of_image.get_total_flops(), of_text)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs utilization (arXiv:2204.02311, appendix B).

    Forward and backward count as three forward passes; recomputation does not count. A text counts in proportion to the
    share of its context that its tokens fill. A fully locked tower counts its forward pass only, and a tower with
    adapters two passes, since its weights have no gradients.
    """

    forward: ForwardFlops
    image_passes: int  # forward and backward of the image tower, in forward passes
    text_passes: int
    context_length: int
    image_size: int  # for which `forward` counts
    image_tokens: int | None  # of an image with all patches; None for images of one size
    peak: float  # FLOP/s of one device

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        precision: PrecisionSpec,
        device: torch.device,
        peak: float | None,
        image_tokens: int | None = None,
    ) -> Utilisation | None:
        """Returns None if the peak is unknown.

        `peak`: in TFLOP/s; None: looked up by the name of the device. `image_tokens`: of an image with all patches,
        if the number differs between images.
        """
        peak = known_peak(precision, device, peak)
        if peak is None:
            return None
        image, text = (1 if tower.frozen else 2 if tower.lora.rank else 3 for tower in (model.image, model.text))
        size, length = model.image.size, model.text.context_length
        return cls(ForwardFlops.count(model), image, text, length, size, image_tokens, 1e12 * peak)

    def metrics(
        self, measured: Mapping[str, float], devices: int, image_size: int | None, patch_dropout: float
    ) -> dict[str, float]:
        """Returns {"mfu": the utilization as a share of the peak of all devices}.

        Args:
            measured: `samples_per_second`, `tokens_per_second`, `image_tokens_per_second` of all devices.
            devices: their number.
            image_size: size of the images, None for those without.
            patch_dropout: share of an image's patches that is dropped.
        """
        if self.image_tokens is not None:
            images = measured.get("image_tokens_per_second", 0.0) / self.image_tokens
        else:
            pixels = ((image_size or self.image_size) / self.image_size) ** 2
            images = pixels * (1 - patch_dropout) * measured["samples_per_second"]
        texts = measured["tokens_per_second"] / self.context_length
        done = self.image_passes * self.forward.image * images + self.text_passes * self.forward.text * texts
        return {"mfu": done / (self.peak * devices)}
