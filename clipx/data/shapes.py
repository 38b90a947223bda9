"""Embedded default data: drawn scenes with captions, a pure function of (version, seed, split, index, style).

One in six combinations of colour, texture and shape never occurs in training: it is the zero-shot task.
"""

from __future__ import annotations

import functools
import io
import math
import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.shards.write import ensure_shards
from clipx.data.source import Sample
from clipx.data.spec import Classes, Dataset, DataSpec

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

_VERSION = 1  # part of the folder name: increase it when the drawings change

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (40, 80, 220),
    "yellow": (245, 205, 20),
    "purple": (140, 50, 180),
    "orange": (245, 130, 20),
    "cyan": (30, 190, 210),
    "pink": (245, 130, 190),
}
TEXTURES = ("solid", "striped", "dotted")
SIZES = {"small": 0.7, "medium": 1.0, "large": 1.35}
POSITIONS = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "centre": (0, 0)}
COUNTS = {"one": 1, "two": 2, "three": 3}
BACKGROUNDS = {"white": (250, 250, 250), "black": (12, 12, 12), "grey": (128, 128, 128), "brown": (96, 62, 38)}

COMBINATIONS = tuple(product(COLOURS, TEXTURES, SHAPES))
TEMPLATES = ("a {}", "a picture of a {}", "an image with a {}", "a drawing of a {}")


class Style(StrEnum):
    """Rendering of the scenes. Captions and classes do not depend on it: only the image distribution changes."""

    painted = "painted"
    """Full brightness, no noise."""

    night = "night"
    """Half the brightness, and Gaussian noise with a standard deviation of 4 of 255."""


@functools.cache
def held_out_labels() -> tuple[int, ...]:
    """Returns the held-out labels: one combination in six, one shape for each (colour, texture)."""
    colours, textures = list(COLOURS), list(TEXTURES)
    return tuple(
        label
        for label, (colour, texture, shape) in enumerate(COMBINATIONS)
        if (colours.index(colour) + 2 * textures.index(texture) + SHAPES.index(shape)) % 6 == 0
    )


@dataclass(frozen=True, slots=True)
class Scene:
    colour: str
    texture: str
    shape: str
    size: str
    position: str
    count: str
    background: str

    @property
    def label(self) -> int:
        return COMBINATIONS.index((self.colour, self.texture, self.shape))


@register("data")
@frozen
class ShapesSpec(DataSpec):
    """Drawn scenes with captions, written once as WebDataset shards.

    One in six combinations of colour, texture and shape is held out for zero-shot evaluation.
    """

    kind: str = "shapes"
    """Kind of data: drawn scenes with captions."""

    samples: int = option(12_000, ge=2)
    """Number of training images."""

    held_out_samples: int = option(960, ge=1)
    """Number of evaluation images, all of held-out combinations."""

    pixels: int = option(48, ge=16, le=512)
    """Width and height of the images in pixels."""

    seed: int = 0
    """Seed of the scenes, independent of the seed of the run."""

    style: Style = Style.painted
    """Rendering of the scenes: painted, or night (half the brightness, with noise). Captions and classes are equal."""

    @property
    def generated(self) -> int | None:
        return self.samples

    def open(self) -> Dataset:
        """Opens the shards, written first if they are not in the cache."""
        from clipx.data.shards.shards import Shards

        style = "" if self.style is Style.painted else f"-{self.style}"

        def shards(name: str, samples: int, held_out: bool) -> Shards:
            folder = f"shapes-v{_VERSION}-{self.seed}-{self.pixels}px{style}/{name}-{samples}"
            make = functools.partial(
                make_sample, seed=self.seed, held_out=held_out, pixels=self.pixels, style=self.style
            )
            urls = ensure_shards(folder, make, samples, per_shard=1000, what=f"shapes ({name})")
            return Shards.open(urls, "json.captions", "json.label")

        names = tuple(" ".join(combination) for combination in COMBINATIONS)
        return Dataset(
            train=shards("train", self.samples, held_out=False),
            held_out=shards("held-out", self.held_out_samples, held_out=True),
            classes=Classes(names, TEMPLATES, {"held_out": held_out_labels()}),
        )


def make_sample(index: int, *, seed: int, held_out: bool, pixels: int, style: Style = Style.painted) -> Sample:
    """Returns sample `index` of a split: the image as JPEG, captions, and the label of its combination."""
    rng = random.Random(f"{_VERSION}/{seed}/{held_out}/{index}")
    scene = random_scene(rng, held_out, index)
    captions = [full_caption(scene)] if held_out else [full_caption(scene), *(caption(scene, rng) for _ in range(4))]
    encoded = io.BytesIO()
    draw(scene, rng, pixels, style).save(encoded, "JPEG", quality=92)
    return Sample(encoded.getvalue(), captions, scene.label)


def random_scene(rng: random.Random, held_out: bool, index: int) -> Scene:
    labels = _labels(held_out)
    colour, texture, shape = COMBINATIONS[labels[index % len(labels)]]  # every combination equally often
    size, position, count, background = (rng.choice(list(of)) for of in (SIZES, POSITIONS, COUNTS, BACKGROUNDS))
    return Scene(colour, texture, shape, size, position, count, background)


@functools.cache
def _labels(held_out: bool) -> tuple[int, ...]:
    return tuple(label for label in range(len(COMBINATIONS)) if (label in held_out_labels()) == held_out)


# ------------------------------------------------------------------------------------------------ captions


def _noun(scene: Scene, size: bool = False) -> str:
    """Returns adjectives and noun, in the plural for several: `large red striped star`, `blue solid rings`."""
    words = [scene.size] if size else []
    words += [scene.colour, scene.texture, scene.shape]
    if scene.count != "one":
        words[-1] += "es" if scene.shape.endswith("s") else "s"
    return " ".join(words)


def _place(scene: Scene) -> str:
    return f"at the {scene.position}" if scene.position != "centre" else "in the centre"


def full_caption(scene: Scene) -> str:
    """Returns a caption that names every attribute."""
    return f"{scene.count} {_noun(scene, size=True)} {_place(scene)} on a {scene.background} background"


def caption(scene: Scene, rng: random.Random) -> str:
    """Returns a random caption. Most forms omit some attributes, as human captions do."""
    article = "a" if scene.count == "one" else scene.count
    return rng.choice(
        (
            f"{article} {_noun(scene)}",
            f"a picture of {article} {_noun(scene, size=True)}",
            f"an image with {article} {_noun(scene)} {_place(scene)}",
            f"{article} {_noun(scene)} on {scene.background}",
            f"on a {scene.background} background, {article} {_noun(scene, size=True)}",
            f"a drawing of {article} {_noun(scene)}, {scene.size}, {_place(scene)}",
        )
    )


# ------------------------------------------------------------------------------------------------- drawing

_OVERSAMPLE = 3  # drawn larger and scaled down: smooth edges


def draw(scene: Scene, rng: random.Random, pixels: int, style: Style = Style.painted) -> Image.Image:
    """Draws the scene as RGB. `rng` varies position and brightness slightly, and draws the noise of the night style."""
    from PIL import Image, ImageDraw

    side = pixels * _OVERSAMPLE
    image = Image.new("RGB", (side, side), _jitter(BACKGROUNDS[scene.background], rng))
    mask = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(mask)
    count = COUNTS[scene.count]
    radius = 0.15 * side * SIZES[scene.size] * (1.0, 0.85, 0.7)[count - 1]
    for x, y in _centres(scene, rng, count, side):
        _outline(pen, scene.shape, x, y, radius)
    fill = Image.new("RGB", (side, side), _jitter(COLOURS[scene.colour], rng))
    image.paste(fill, mask=_textured(mask, scene.texture, side))
    image = image.resize((pixels, pixels), Image.Resampling.BOX)
    return _at_night(image, rng) if style is Style.night else image


def _at_night(image: Image.Image, rng: random.Random) -> Image.Image:
    """Halves the brightness and adds Gaussian noise with a standard deviation of 4 of 255."""
    from PIL import Image

    noise = (rng.gauss(0, 4) for _ in range(3 * image.width * image.height))
    dark = bytes(
        min(255, max(0, round(value / 2 + shift))) for value, shift in zip(image.tobytes(), noise, strict=True)
    )
    return Image.frombytes("RGB", image.size, dark)


def _jitter(rgb: tuple[int, int, int], rng: random.Random) -> tuple[int, int, int]:
    shift = rng.randint(-12, 12)
    r, g, b = (min(255, max(0, value + shift)) for value in rgb)
    return r, g, b


def _centres(scene: Scene, rng: random.Random, count: int, side: int) -> list[tuple[float, float]]:
    """Returns the centres of the shapes: in a row, or in a column at the left and right position."""
    dx, dy = POSITIONS[scene.position]
    x = side * (0.5 + 0.24 * dx + rng.uniform(-0.03, 0.03))
    y = side * (0.5 + 0.24 * dy + rng.uniform(-0.03, 0.03))
    offsets = [(i - (count - 1) / 2) * 0.3 * side for i in range(count)]
    return [(x, y + offset) if dx else (x + offset, y) for offset in offsets]


def _outline(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float) -> None:
    """Draws a filled shape. All shapes have about the same area."""
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        pen.ellipse(box, fill=255)
    elif shape == "ring":
        pen.ellipse(box, fill=255)
        hole = 0.55 * r
        pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    elif shape == "square":
        pen.rectangle(tuple(v + s * 0.12 * r for v, s in zip(box, (1, 1, -1, -1), strict=True)), fill=255)
    elif shape == "triangle":
        pen.polygon(_polygon(x, y + 0.15 * r, [1.15 * r] * 3), fill=255)
    elif shape == "star":
        pen.polygon(_polygon(x, y, [1.15 * r, 0.48 * r] * 5), fill=255)
    else:  # a cross
        arm = 0.36 * r
        pen.rectangle((x - arm, y - r, x + arm, y + r), fill=255)
        pen.rectangle((x - r, y - arm, x + r, y + arm), fill=255)


def _polygon(x: float, y: float, radii: list[float]) -> list[tuple[float, float]]:
    """Returns corners at the given distances from the centre, starting at the top."""
    angles = [2 * math.pi * i / len(radii) for i in range(len(radii))]
    return [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]


def _textured(mask: Image.Image, texture: str, side: int) -> Image.Image:
    """Returns the part of the mask that is coloured by the texture."""
    from PIL import Image, ImageChops, ImageDraw

    if texture == "solid":
        return mask
    pattern = Image.new("L", mask.size, 0)
    pen = ImageDraw.Draw(pattern)
    if texture == "striped":
        period = max(2, side // 12)
        for i in range(0, 2 * side, period):
            pen.line((i, 0, i - side, side), fill=255, width=period // 2)
    else:
        period = max(2, side // 14)
        for i, j in product(range(0, side, period), repeat=2):
            r = 0.36 * period
            pen.ellipse((i - r, j - r, i + r, j + r), fill=255)
    return ImageChops.multiply(mask, pattern)
