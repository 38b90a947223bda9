"""Peak rates and memory of devices, from the data sheets of NVIDIA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """Data sheet of one device. Rates are dense TFLOP/s, memory is in GB."""

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
