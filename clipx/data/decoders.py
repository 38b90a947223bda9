"""Decoders of training images: the loader processes, and those of packages. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.registry import load_options, missing_text
from clipx.config.suggestions import did_you_mean
from clipx.errors import require

CPU = "cpu"  # value of data.decode: the loader processes decode all images


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decoder of training images outside the loader processes. A module registers it by `register_decoder`, and a
    package declares the module: `declare("decoder", MODULE, NAME)`."""

    name: str
    """Value of data.decode."""

    reader: str
    """Subclass of clipx.data.images.PixelReader, as MODULE:NAME, whose `like(reader)` reads the images of a reader."""

    device_type: str
    """Device that decodes, such as cuda."""

    by: str
    """Library that decodes, for messages."""

    def check_device_type(self, device_type: str) -> None:
        """Raises ConfigError if this device, that of a run, does not decode images."""
        require(
            device_type == self.device_type,
            f"data.decode={self.name} decodes by {self.by}, and this run is on {device_type}: use data.decode={CPU}, "
            f"or train on {self.device_type}",
        )


_decoders: dict[str, Decoder] = {}


def register_decoder(decoder: Decoder) -> None:
    """Registers a decoder."""
    _decoders[decoder.name] = decoder


def check_decoder(key: str, name: str) -> None:
    """Raises ConfigError unless there is a decoder with this name, the value of the option `key`."""
    if name != CPU:
        load_options("decoder")
        known = [CPU, *_decoders]
        fix = f"choose one of {', '.join(known)}{did_you_mean(name, known)}{missing_text()}"
        require(name in known, f"{key}={name} is not a decoder: {fix}")


def decoder_of(name: str) -> Decoder | None:
    """Returns the decoder with a name, None for the loader processes. Raises ConfigError for an unknown name."""
    check_decoder("data.decode", name)
    return _decoders.get(name)
