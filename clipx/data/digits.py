"""Scanned digits of scikit-learn: 1,797 real images of 8 x 8 pixels, every fifth one held out."""

from __future__ import annotations

import functools
import hashlib
import io
from typing import Any

from clipx.config.registry import frozen, register
from clipx.data.shards.write import ensure_shards
from clipx.data.source import Sample, split
from clipx.data.spec import Classes, Dataset, DataSpec
from clipx.errors import ConfigError

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ('a photo of the number: "{}"', "a scan of the digit {}", "the handwritten digit {}", "{}")
_HELD_OUT = 0.2
_PIXELS = 32
_VERSION = 1


@register("data")
@frozen
class DigitsSpec(DataSpec):
    """Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998; the UCI test set)."""

    kind: str = "digits"
    """Kind of data: scikit-learn's 1,797 scanned digits."""

    def open(self) -> Dataset:
        """Opens the shards, written first if they are not in the cache. Raises ConfigError without scikit-learn."""
        from clipx.data.shards.shards import Shards

        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError("data=digits needs scikit-learn: pip install 'clipx[examples]'") from error
        images, labels = load_digits(return_X_y=True)
        version = hashlib.sha256(images.tobytes()).hexdigest()[:8]
        make = functools.partial(make_sample, images=images.reshape(-1, 8, 8), labels=labels)
        folder = f"digits-v{_VERSION}-{version}"
        urls = ensure_shards(folder, make, len(images), per_shard=1000, what="digits")
        shards = Shards.open(urls, "json.captions", "json.label")
        return Dataset(*split(shards, _HELD_OUT), Classes(NAMES, TEMPLATES))


def make_sample(index: int, *, images: Any, labels: Any) -> Sample:
    """Returns sample `index` of images [n, 8, 8] in 0..16 and labels [n], with one caption per template."""
    from PIL import Image

    ink = Image.fromarray((images[index] * (255 / 16)).astype("uint8"))
    encoded = io.BytesIO()
    ink.resize((_PIXELS, _PIXELS), Image.Resampling.BICUBIC).convert("RGB").save(encoded, "JPEG", quality=95)
    label = int(labels[index])
    return Sample(encoded.getvalue(), [t.format(NAMES[label]) for t in TEMPLATES], label)
