"""Draws augmentation.jpg: what consecutive epochs read of one photograph, with each augmentation.

Run it with `python docs/guides/augmentation.py`. The photograph is one that matplotlib contains, in the public domain.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from clipx.data.augment_spec import AugmentSpec, ColorJitterSpec, RandAugmentSpec
from clipx.data.images import Draw, PixelReader

HERE = Path(__file__).parent
SIDE, EPOCHS, GAP, LABEL = 96, 8, 4, 130  # pixels of a picture; pictures in a row; pixels between them; of a row's name

ROWS: dict[str, tuple[list[float], AugmentSpec | None]] = {
    "crops of\n90 to 100 %": ([0.9, 1.0], None),
    "crops of\n40 to 100 %": ([0.4, 1.0], None),
    "flip=0.5": ([0.9, 1.0], AugmentSpec(flip=0.5)),
    "rand_augment\noperations: 2": ([0.9, 1.0], AugmentSpec(rand_augment=RandAugmentSpec(operations=2))),
    "color_jitter\nprobability: 1": ([0.9, 1.0], AugmentSpec(color_jitter=ColorJitterSpec(probability=1))),
    "grayscale=0.5": ([0.9, 1.0], AugmentSpec(grayscale=0.5)),
    "erase=0.5": ([0.9, 1.0], AugmentSpec(erase=0.5)),
}


def picture() -> Image.Image:
    encoded = Path(get_data_path(), "sample_data", "grace_hopper.jpg").read_bytes()
    size = (LABEL + EPOCHS * (SIDE + GAP), len(ROWS) * (SIDE + GAP) - GAP)
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for row, (name, (scale, augment)) in enumerate(ROWS.items()):
        top = row * (SIDE + GAP)
        draw.multiline_text((4, top + SIDE // 2), name, "black", font, anchor="lm")
        for epoch in range(EPOCHS):
            sheet.paste(drawn(encoded, scale, augment, epoch), (LABEL + epoch * (SIDE + GAP), top))
    return sheet


def drawn(encoded: bytes, scale: list[float], augment: AugmentSpec | None, epoch: int) -> Image.Image:
    """Returns the photograph as a run with the seed 0 reads it at a position."""
    reader = PixelReader((SIDE,), scale, 10**7, augmentation=augment)
    pixels = torch.empty((SIDE, SIDE, 3), dtype=torch.uint8)
    reader.load(encoded, Draw(random.Random(f"0/{epoch}"), f"0/{epoch}/augment"), pixels)
    return Image.fromarray(pixels.numpy())


if __name__ == "__main__":
    picture().save(HERE / "augmentation.jpg", quality=75)
