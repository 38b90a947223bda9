"""`python -m clipx.caption run=outputs/… images=…`: what a captioner says of pictures, a JSON line each."""

from __future__ import annotations

import contextlib
import glob
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.distributed.spec import DistributedSpec
from clipx.errors import DataError, require
from clipx.precision.spec import PrecisionSpec

if TYPE_CHECKING:
    from clipx.evaluator.captioner import Line
    from clipx.model.coca import CoCa
    from clipx.model.generate import LengthBounds, Method

_PICTURES = (".jpg", ".jpeg", ".png", ".webp")
Number = TypeVar("Number", int, float)


class DecodingMethod(StrEnum):
    """How the words are chosen."""

    beam = "beam"  # the best of the captions that a beam search finds
    greedy = "greedy"  # the likeliest at each step
    sample = "sample"  # at random, as likely as the model has them


@option("")
@dataclass(kw_only=True, slots=True)
class CaptionSpec:
    """Images are seen as by evaluation: the shorter side resized, the centre cut out."""

    kind: str = "caption"
    run: str = MISSING  # a captioner, as model.weights; of a run the moving average where one was kept
    images: str = MISSING  # a folder, of which all JPEG, PNG and WebP files at any depth; or a pattern; or a file
    out: str | None = None  # a file for the lines, besides the screen
    method: DecodingMethod = DecodingMethod.beam
    beams: int | None = None  # of beam: beginnings that go on; null: 6
    length_penalty: float | None = None  # of beam: the best has the largest log p / tokens^this; null: 1
    temperature: float | None = None  # of sample: scores are divided by it; null: 1
    top_k: int | None = None  # of sample: out of so many of the likeliest tokens; null: out of all
    top_p: float | None = None  # of sample: out of the fewest likeliest that are so probable together; null: out of all
    seed: int | None = None  # of sample; null: 0
    min_length: int = 0  # tokens, without start and end
    max_length: int | None = None  # as min_length; null: what the model's context has room for
    batch_size: int = 32  # images at a time; captions do not depend on it
    max_bad_share: float = 0.1  # an error where a larger share of the images cannot be used
    max_pixels: int = 89_000_000  # larger images are bad: a few bytes can unpack to gigabytes
    precision: PrecisionSpec = MISSING
    distributed: DistributedSpec = MISSING

    def __post_init__(self) -> None:
        beam = {"beams": self.beams, "length_penalty": self.length_penalty}
        sample = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        for method, given in ((DecodingMethod.beam, beam), (DecodingMethod.sample, sample)):
            for key, value in given.items():
                require(
                    value is None or self.method is method,
                    f"{key}={value} has no effect on method={self.method}: add method={method}, or leave it out",
                )
        for key, number, least in (
            *(("beams", self.beams, 1), ("top_k", self.top_k, 1), ("length_penalty", self.length_penalty, 0)),
            *(("seed", self.seed, 0), ("batch_size", self.batch_size, 1), ("max_pixels", self.max_pixels, 1)),
        ):
            require(number is None or number >= least, f"{key}={number} must be at least {least}")
        require(self.temperature is None or self.temperature > 0, f"temperature={self.temperature} must be above 0")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p} must lie in (0, 1]: 0.9 is usual")
        require(0 <= self.max_bad_share <= 1, f"max_bad_share={self.max_bad_share} must lie in [0, 1]")
        require(self.min_length >= 0, f"min_length={self.min_length} must be at least 0")
        require(
            self.max_length is None or self.max_length >= self.min_length,
            f"max_length={self.max_length} is less than min_length={self.min_length}: give a larger one",
        )

    def files(self) -> list[str]:
        """In the order of their names. Raises ConfigError where there are none."""
        place = Path(self.images)
        if place.is_dir():
            found = [str(path) for path in place.rglob("*") if path.suffix.lower() in _PICTURES and path.is_file()]
        elif place.is_file():
            found = [self.images]
        else:
            matched = glob.glob(self.images, recursive=True)  # noqa: PTH207  # pathlib's refuses an absolute pattern
            found = [path for path in matched if Path(path).is_file()]
        require(
            bool(found), f"images={self.images} is no picture, nor are any there: give a folder, a pattern or a file"
        )
        return sorted(found)

    def bounds(self, context: int) -> LengthBounds:
        """Raises ConfigError where the model's context has no room."""
        from clipx.model.generate import LengthBounds

        room = context - 2
        for key, tokens in (("min_length", self.min_length), ("max_length", self.max_length or 0)):
            require(
                tokens <= room,
                f"{key}={tokens} is more than the {room} tokens that a context of {context} has room for between start "
                f"and end: give at most {room}",
            )
        return LengthBounds(self.min_length, room if self.max_length is None else self.max_length)

    def build(self) -> Method:
        """How the words are chosen."""
        from clipx.model.generate import BeamSearch, Sampling, greedy

        if self.method is DecodingMethod.greedy:
            return greedy
        if self.method is DecodingMethod.beam:
            return BeamSearch(_or(self.beams, 6), _or(self.length_penalty, 1.0))
        return Sampling(_or(self.temperature, 1.0), self.top_k, _or(self.top_p, 1.0), _or(self.seed, 0))


def _or(value: Number | None, null: Number) -> Number:
    return null if value is None else value


def caption(spec: CaptionSpec) -> None:
    """On any number of ranks, which share the images. Raises DataError where too many images are bad."""
    files = spec.files()  # before torch is loaded: a mistyped path is answered at once
    out = spec.out
    require(out is None or not Path(out).exists(), f"out={out} is there already: give another file, or remove it")
    from clipx.evaluator.captioner import Captioner
    from clipx.weights.load import load_model

    comm = spec.distributed.build()
    try:
        precision = spec.precision.build(comm.device)
        _, model_spec, model = load_model(spec.run, "run", comm.device, precision.dtype)
        require(
            model_spec.captions,
            f"run={spec.run} does not caption (its model is {model_spec.name}): give one of model=coca_vit_b32 or its "
            "like",
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
        )
        with contextlib.ExitStack() as stack:
            to = [sys.stdout] if comm.is_main else []
            if comm.is_main and out is not None:
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                to.append(stack.enter_context(Path(out).open("x", encoding="utf-8")))
            bad = _write(captioner.lines(files), to)
        if comm.is_main:
            written = "" if out is None else f", written to {out}"
            print(f"{len(files) - bad} of {len(files)} images captioned{written}", file=sys.stderr)
        if bad > spec.max_bad_share * len(files) or bad == len(files):
            raise DataError(f"{bad} of {len(files)} images are bad, more than max_bad_share={spec.max_bad_share:g}")
    finally:
        comm.close()


def _write(lines: Iterator[Line], to: Sequence[TextIO]) -> int:
    """Good ones to `to`, bad ones to stderr. Returns how many are bad."""
    bad = 0
    for line in lines:
        if "bad" in line:
            bad += 1
            if to:
                print(f"bad: {line['image']}: {line['bad']}", file=sys.stderr)
            continue
        for file in to:
            print(json.dumps(line, ensure_ascii=False), file=file, flush=True)
    return bad


main = cli(caption, "caption")

if __name__ == "__main__":
    main()
