"""`python -m clipx.caption run=outputs/… images=…`: captions images, one JSON line each."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from clipx.cli import cli, imports
from clipx.config.registry import MISSING, frozen, register
from clipx.data.folder import images_of, unread_notes
from clipx.data.spec import MAX_PIXELS
from clipx.data.walk import is_hidden, walk
from clipx.distributed.spec import DistributedSpec
from clipx.errors import DataError, require
from clipx.escape import json_text, print_stderr
from clipx.extra.coca.spec import CAPTION_LOSSES
from clipx.output import lose_output
from clipx.precision.spec import PrecisionSpec
from clipx.weights.model_spec import UNUSED, WeightsModelSpec
from clipx.weights.spec import check_exists

if TYPE_CHECKING:
    from clipx.extra.coca.captioner import Line
    from clipx.extra.coca.generate import LengthBounds, Method
    from clipx.extra.coca.model import CoCa

Number = TypeVar("Number", int, float)


class DecodingMethod(StrEnum):
    """Method that selects the tokens of a caption."""

    beam = "beam"
    """Best caption of a beam search."""

    greedy = "greedy"
    """Most likely token at each step."""

    sample = "sample"
    """Tokens sampled with the model's probabilities."""


@register("")
@frozen
class CaptionSpec(WeightsModelSpec):
    """Options of clipx.caption.

    Images are preprocessed as in evaluation: resized by the shorter side and cropped to the centre.
    """

    kind: str = "caption"
    """Name of this command's options. The key itself cannot be set."""

    run: str = MISSING
    """Captioning model, e.g. of model=coca_vit_b32: any value of model.weights. Of a run, the moving average
    of its weights if it has one."""

    images: str = MISSING
    """Images to caption. A folder (its JPEG, PNG and WebP files at any depth), a glob pattern, or a file."""

    out: str | None = None
    """Output file for the JSON lines, in addition to standard output. It must not exist. null: no file."""

    method: DecodingMethod = DecodingMethod.beam
    """Selection of the tokens. `beam`: the best caption of a beam search. `greedy`: the most likely token at each step.
    `sample`: at random with the model's probabilities."""

    beams: int | None = None
    """Number of partial captions that beam search continues. At least 1; null: 6. Only for method=beam."""

    length_penalty: float | None = None
    """Exponent of the length: the best caption has the largest log-probability / tokens^length_penalty. At least 0;
    null: 1. Only for method=beam."""

    temperature: float | None = None
    """Divisor of the scores of tokens, above 0; null: 1. Only for method=sample."""

    top_k: int | None = None
    """Number of most likely tokens to sample from. At least 1; null: all tokens. Only for method=sample."""

    top_p: float | None = None
    """Total probability of the tokens to sample from, in (0, 1]: the fewest most likely tokens that reach it. null: all
    tokens. Only for method=sample."""

    seed: int | None = None
    """Seed of the sampling. At least 0; null: 0. Only for method=sample."""

    min_length: int = 0
    """Minimum length of a caption in tokens, without start and end. At least 0."""

    max_length: int | None = None
    """Maximum length of a caption in tokens, without start and end. At least min_length. null: all that the model's
    context has room for, its length - 2."""

    batch_size: int = 32
    """Number of images that a rank captions at a time, at least 1. Captions do not depend on it."""

    max_bad_share: float = 0.1
    """Largest share of bad images, in [0, 1]. The command fails if more than this share, or all, cannot be used."""

    max_pixels: int = 89_000_000
    """Largest width x height of an image, in pixels, in [1, 715827882] (2 GiB as RGB). Larger images are bad images and
    are not decoded: a few bytes can decompress to gigabytes."""

    precision: PrecisionSpec = MISSING
    """Number format of the model."""

    distributed: DistributedSpec = MISSING
    """Processes and devices. The ranks share the images."""

    def __post_init__(self) -> None:
        WeightsModelSpec.__post_init__(self)
        beam = {"beams": self.beams, "length_penalty": self.length_penalty}
        sample = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        for method, given in ((DecodingMethod.beam, beam), (DecodingMethod.sample, sample)):
            for key, value in given.items():
                require(
                    value is None or self.method is method,
                    f"{key}={value} has no effect on method={self.method}: add method={method}, or remove it",
                )
        for key, number, least in (
            ("beams", self.beams, 1),
            ("top_k", self.top_k, 1),
            ("length_penalty", self.length_penalty, 0),
            ("seed", self.seed, 0),
            ("batch_size", self.batch_size, 1),
        ):
            require(number is None or number >= least, f"{key}={number} must be at least {least}")
        require(self.temperature is None or self.temperature > 0, f"temperature={self.temperature} must be above 0")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]: 0.9 is usual")
        require(0 <= self.max_bad_share <= 1, f"max_bad_share={self.max_bad_share} must be in [0, 1]")
        require(1 <= self.max_pixels <= MAX_PIXELS, f"max_pixels={self.max_pixels} must be in [1, {MAX_PIXELS}]")
        require(self.min_length >= 0, f"min_length={self.min_length} must be at least 0")
        require(
            self.max_length is None or self.max_length >= self.min_length,
            f"max_length={self.max_length} is less than min_length={self.min_length}: give a larger one",
        )

    def files(self) -> list[str]:
        """Returns the image files, sorted by name. Raises ConfigError if there are none."""
        place = Path(self.images)
        if place.is_dir():
            files = list(walk(str(place), f"images={self.images}"))
            found = images_of(files)
            for note in unread_notes(self.images, files):
                print_stderr(note)
        elif place.is_file():
            found = [self.images]
        else:
            found = self._matches()
        require(bool(found), f"images={self.images} matches no images: give a folder, a pattern or a file")
        return sorted(found)

    def _matches(self) -> list[str]:
        """Returns the files that the pattern matches, those through links to folders among them."""
        parts = Path(self.images).parts
        if "**" not in parts:
            matched = glob.glob(self.images)  # noqa: PTH207  # pathlib's refuses an absolute pattern
            return [path for path in matched if Path(path).is_file()]
        from fsspec.utils import glob_translate

        # glob's ** enters links to folders above, again and again.
        root = Path(*takewhile(lambda part: not glob.has_magic(part), parts))
        pattern = Path(*(part if part == "**" else re.sub(r"\*+", "*", part) for part in parts))
        matches = re.compile(glob_translate(str(pattern))).match
        files = walk(str(root), f"images={self.images}") if root.is_dir() else ()
        return [file for file in map(str, map(Path, files)) if matches(file) and not is_hidden(file)]

    def bounds(self, context: int) -> LengthBounds:
        """Returns the bounds of a caption's length. Raises ConfigError if they exceed the model's context."""
        from clipx.extra.coca.generate import LengthBounds

        room = context - 2
        for key, tokens in (("min_length", self.min_length), ("max_length", self.max_length or 0)):
            require(
                tokens <= room,
                f"{key}={tokens} is more than the {room} tokens that fit between start and end in a context of "
                f"{context}: give at most {room}",
            )
        return LengthBounds(self.min_length, room if self.max_length is None else self.max_length)

    def build(self) -> Method:
        """Returns the decoding method with its options."""
        from clipx.extra.coca.generate import BeamSearch, Sampling, greedy

        if self.method is DecodingMethod.greedy:
            return greedy
        if self.method is DecodingMethod.beam:
            return BeamSearch(_or(self.beams, 6), _or(self.length_penalty, 1.0))
        return Sampling(_or(self.temperature, 1.0), self.top_k, _or(self.top_p, 1.0), _or(self.seed, 0))


def _or(value: Number | None, null: Number) -> Number:
    return null if value is None else value


def caption(spec: CaptionSpec) -> None:
    """Captions the images. Raises DataError if too many images are bad. Collective."""
    files = spec.files()  # before torch is loaded, so that a mistyped path fails immediately
    out = spec.out
    require(out is None or not Path(out).exists(), f"out={out} exists already: give another file, or remove it")
    spec.distributed.check_launch()
    check_exists(spec.run, "run")
    with imports():
        from clipx.extra.coca.captioner import Captioner
        from clipx.report.console import Progress
        from clipx.weights.load import load_model

    with spec.distributed.joined() as comm:
        precision = spec.precision.build(comm.device)
        _, model_spec, model = load_model(spec.run, "run", comm.device, precision.dtype, spec)
        require(
            model_spec.outputs == CAPTION_LOSSES,
            f"run={spec.run} cannot caption (its model is {model_spec.name}): give a captioning model, e.g. of "
            "model=coca_vit_b32",
        )
        text = model_spec.text
        captioner = Captioner(
            model=cast("CoCa", model),
            tokenizer=text.build_tokenizer(),
            method=spec.build(),
            bounds=spec.bounds(text.context_length),
            comm=comm,
            precision=precision,
            batch_size=spec.batch_size,
            max_pixels=spec.max_pixels,
            progress=Progress(shown=comm.is_main, name="captioning"),
        )
        with contextlib.ExitStack() as stack:
            to: list[TextIO | None] = [None] if comm.is_main else []
            if comm.is_main and out is not None:
                lose_output()
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                to.append(stack.enter_context(Path(out).open("x", encoding="utf-8")))
            bad = _write(captioner.lines(files), to)
        if comm.is_main:
            written = "" if out is None else f", written to {out}"
            print_stderr(f"{len(files) - bad} of {len(files)} images captioned{written}")
        if bad > spec.max_bad_share * len(files) or bad == len(files):
            share = f", more than max_bad_share={spec.max_bad_share:g}" if bad < len(files) else ""
            raise DataError(f"{bad} of {len(files)} images are bad{share}: the lines above name the reasons")


def _write(lines: Iterator[Line], to: Sequence[TextIO | None]) -> int:
    """Writes captions to `to`, None for standard output, and bad images to stderr. Returns the number of bad images."""
    bad = 0
    for line in lines:
        if "bad" in line:
            bad += 1
            if to:
                print_stderr(f"bad: {line['image']}: {line['bad']}")
            continue
        for file in to:
            print(json_text(line), file=file, flush=True)
    return bad


main = cli(caption, "caption", unused=UNUSED, prints=True)

if __name__ == "__main__":
    main()
