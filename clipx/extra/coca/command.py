"""`python -m clipx.caption run=outputs/… images=…`: captions images, one JSON line each."""

from __future__ import annotations

import glob
import re
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from clipx.cli import cli, imports
from clipx.command_spec import UNUSED, RunCommandSpec
from clipx.config.registry import MISSING, frozen, option, register
from clipx.data.folder import images_of, unread_notes
from clipx.data.image_files import is_hidden, walk
from clipx.errors import DataError, require
from clipx.escape import json_text, print_stderr
from clipx.extra.coca.spec import CAPTION_LOSSES
from clipx.weights.spec import check_exists

if TYPE_CHECKING:
    from clipx.extra.coca.generate import LengthBounds, Method
    from clipx.extra.coca.model import CoCa

_MAX_BAD_SHARE = 0.1  # of the images: above it, or if all are bad, the command fails


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
class CaptionSpec(RunCommandSpec):
    """Options of clipx.caption.

    Images are preprocessed as in evaluation: resized by the shorter side and cropped to the centre.
    """

    kind: str = "caption"
    """Name of this command's options. The key itself cannot be set."""

    images: str = MISSING
    """Images to caption. A folder (its JPEG, PNG and WebP files at any depth), a glob pattern, or a file."""

    method: DecodingMethod = DecodingMethod.beam
    """Selection of the tokens. `beam`: the best caption of a beam search. `greedy`: the most likely token at each step.
    `sample`: at random with the model's probabilities."""

    beams: int = option(6, ge=1, when="method == beam")
    """Number of partial captions that beam search continues."""

    length_penalty: float = option(1.0, ge=0, when="method == beam")
    """Exponent of the length: the best caption has the largest log-probability / tokens^length_penalty."""

    temperature: float = option(1.0, gt=0, when="method == sample")
    """Divisor of the scores of tokens."""

    top_k: int | None = option(None, ge=1, when="method == sample")
    """Number of most likely tokens to sample from. null: all tokens."""

    top_p: float = option(1.0, gt=0, le=1, when="method == sample", hint="0.9 is usual")
    """Total probability of the tokens to sample from: the fewest most likely tokens that reach it. 1: all tokens."""

    seed: int = option(0, ge=0, when="method == sample")
    """Seed of the sampling."""

    min_length: int = option(0, ge=0)
    """Minimum length of a caption in tokens, without start and end."""

    max_length: int | None = None
    """Maximum length of a caption in tokens, without start and end. At least min_length. null: all that the model's
    context has room for, its length - 2."""

    batch_size: int = option(32, ge=1)
    """Number of images that a rank captions at a time. Captions do not depend on it."""

    def __post_init__(self) -> None:
        RunCommandSpec.__post_init__(self)
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
            return BeamSearch(self.beams, self.length_penalty)
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def caption(spec: CaptionSpec) -> None:
    """Prints a JSON line for each image. Raises DataError if too many images are bad. Collective."""
    files = spec.files()  # before torch is loaded, so that a mistyped path fails immediately
    spec.distributed.check_launch()
    check_exists(spec.run, "run")
    with imports():
        from clipx.extra.coca.captioner import Captioner
        from clipx.report.console import Progress
        from clipx.weights.load import load_model

    with spec.distributed.joined() as comm:
        precision = spec.number_format.build(comm.device)
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
            progress=Progress(shown=comm.is_main, name="captioning"),
        )
        bad = 0
        for line in captioner.lines(files):
            bad += "bad" in line
            if comm.is_main and "bad" in line:
                print_stderr(f"bad: {line['image']}: {line['bad']}")
            elif comm.is_main:
                print(json_text(line), flush=True)
        if comm.is_main:
            print_stderr(f"{len(files) - bad} of {len(files)} images captioned")
        if bad > _MAX_BAD_SHARE * len(files) or bad == len(files):
            share = f", more than {_MAX_BAD_SHARE:.0%}" if bad < len(files) else ""
            raise DataError(f"{bad} of {len(files)} images are bad{share}: the lines above name the reasons")


main = cli(caption, "caption", unused=UNUSED, prints=True)

if __name__ == "__main__":
    main()
