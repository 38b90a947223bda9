"""Writes an HTML page about a data set as training reads it: `python -m clipx.data.look data=…`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clipx.cli import cli, imports
from clipx.config.saved import to_dict
from clipx.data.look.spec import UNUSED, LookSpec
from clipx.data.spec import Dataset, exchange_captions, non_default_values, open_data, training_order
from clipx.distributed.launch_env import check_cores
from clipx.errors import ConfigError
from clipx.escape import print_stderr
from clipx.storage.local import ensure_folder, write_atomically

with imports():
    from clipx.data.loader import TrainBatches, used_mask
    from clipx.data.look import page, pictures
    from clipx.data.look.findings import Finding, findings, percent
    from clipx.data.look.measure import measure
    from clipx.data.look.page import Content, Group, SourceRow
    from clipx.data.look.pictures import Captions, CaptionTokens, Tile
    from clipx.data.look.statistics import Statistics
    from clipx.data.source import BadSample, Source, prefetch_samples
    from clipx.data.views import view_of

_DRAWN = 3  # samples of which several draws are shown
_GROUPS = 12  # groups of duplicates that are shown, of each kind
_MEMBERS = 6  # members of a group that are shown
_REPEATED = 15
_LONGEST = 8
_FIX = "make room, or give another file with out=…"


def look(spec: LookSpec) -> None:
    """Reads the samples, writes the page, and prints a summary and the findings."""
    if spec.data is None:
        raise ConfigError("data has no value: give the data to look at, e.g. data=shapes")
    check_cores("data.workers", spec.data.loader_processes(), warn=True)
    path = Path(spec.out).expanduser()
    ensure_folder(path.parent, f"the folder of out={spec.out}", "give out in")
    dataset = exchange_captions(open_data(spec.data), spec.data, spec.seed)
    content = build(spec, dataset)
    write_atomically(path, lambda temporary: page.write(temporary, content), _FIX)
    _print_summary(spec, content)


def build(spec: LookSpec, dataset: Dataset) -> Content:
    """Reads the samples and returns the content of the page."""
    assert spec.data is not None
    data = spec.data
    order = training_order(data, dataset, spec.seed, ranks=1)
    tokenizer = spec.model.text.build_tokenizer()
    view, mask = view_of(spec.model.image, data), used_mask(data.caption_mask)
    stream = TrainBatches(dataset.train, order, view, tokenizer, spec.seed, mask=mask)
    positions = range(min(spec.samples, order.samples))
    places = _places(stream, positions)
    captions = Captions(tokenizer)
    statistics = Statistics.of(
        _tracked(measure(stream, data.max_pixels, places, data.loader_processes()), len(places)),
        dataset.train.bad,
        tokenizer.context_length,
        len(tokenizer.encode("")),
        spec.near_bits,
    )
    sheet, error = pictures.contact_sheet(stream, captions, range(min(spec.sheet, order.samples)))
    labelled = dataset.classes is not None
    return Content(
        title=f"{data.name}: {statistics.seen:,} of {order.samples:,} training samples",
        about=_about(spec, dataset, statistics),
        findings=findings(spec, statistics, labelled),
        statistics=statistics,
        image_size=spec.model.image.size,
        sheet=sheet,
        error=error,
        draws=list(pictures.draws(stream, captions, data.max_pixels, _drawn(statistics, places))),
        exact=_groups(dataset.train, data.max_pixels, captions, statistics, statistics.exact_groups),
        near=_groups(dataset.train, data.max_pixels, captions, statistics, statistics.near_groups),
        longest=_longest(dataset.train, captions, statistics),
        repeated=_repeated(dataset.train, statistics),
        classes=dataset.classes.names if dataset.classes else (),
        sources=[
            SourceRow(name, count.size, count.samples) for name, count in order.source_counts(len(positions)).items()
        ],
        positions=len(positions),
        configuration=_configuration(spec),
    )


def _configuration(spec: LookSpec) -> str:
    """Returns the keys that the page depends on, as YAML."""
    keys = {key: value for key, value in to_dict(spec).items() if key not in ("kind", *UNUSED)}
    text: str = yaml.dump(keys, sort_keys=False, allow_unicode=True, width=120)
    return text


def _places(stream: TrainBatches, positions: range) -> list[tuple[int, int]]:
    """Returns (position, index) of the distinct samples at positions of the stream."""
    found: dict[int, int] = {}
    for position in positions:
        found.setdefault(stream.order(position), position)
    return [(position, index) for index, position in found.items()]


def _tracked(chunks: Any, samples: int) -> Any:
    """Yields the chunks and shows their progress on stderr."""
    from clipx.data.look.measure import CHUNK
    from clipx.report.console import track

    return track(chunks, f"reading {samples:,} samples", -(-samples // CHUNK), f"chunks of {CHUNK} samples")


def _about(spec: LookSpec, dataset: Dataset, statistics: Statistics) -> list[tuple[str, str]]:
    """Returns the facts at the head of the page."""
    assert spec.data is not None
    total = sum(dataset.train.sizes)
    held_out = 0 if dataset.held_out is None else sum(dataset.held_out.sizes)
    image, words = spec.model.image, spec.model.text
    published = "" if dataset.published is None else f", {dataset.published:,} published"
    return [
        ("data", f"{spec.data.name} ({spec.data.kind}), fingerprint {dataset.train.fingerprint}"),
        ("samples", f"{total:,} for training{published}, {held_out:,} held out"),
        (
            "statistics",
            f"of all {total:,} training samples"
            if statistics.seen == total
            else f"of {statistics.seen:,} of {total:,} training samples: those that training with seed={spec.seed} "
            "reads first",
        ),
        ("model", spec.model.name),
        ("images", ", ".join([f"{image.size} x {image.size} pixels", *_set(spec.data.view_options())])),
        (
            "captions",
            ", ".join(
                [
                    f"model.text.tokenizer={words.tokenizer_place}, at most {words.context_length} tokens",
                    *_set(dict(non_default_values(spec.data, ("caption_mask",)))),
                ]
            ),
        ),
        *(("note", note) for note in dataset.notes),
    ]


def _set(options: Mapping[str, Any]) -> list[str]:
    """Returns options of the data as on the command line."""
    return [f"data.{key}={value}" for key, value in options.items()]


# ------------------------------------------------------------------------------------------------------ samples shown


def _drawn(statistics: Statistics, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the places of the first usable samples with several captions, and then of those with one."""
    position_of = {index: position for position, index in places}
    rows = sorted(statistics.samples[:10_000], key=lambda row: bool(row["captions"] < 2))
    return [(position_of[int(row["index"])], int(row["index"])) for row in rows[:_DRAWN]]


def _groups(
    source: Source, max_pixels: int, captions: Captions, statistics: Statistics, groups: Sequence[Sequence[int]]
) -> list[Group]:
    """Returns the largest groups of rows of `statistics.samples` with their thumbnails and first captions."""
    found = []
    for group in groups[:_GROUPS]:
        indices = [int(statistics.samples[row]["index"]) for row in group[:_MEMBERS]]
        prefetch_samples(source, indices)
        found.append(Group([_with_caption(source, index, max_pixels, captions) for index in indices], len(group)))
    return found


def _with_caption(source: Source, index: int, max_pixels: int, captions: Captions) -> Tile:
    tile = pictures.thumbnail(source, index, max_pixels)
    caption = _caption(source, index, 0)
    return Tile(tile.picture, tile.key, None if caption is None else captions(caption), tile.remark)


def _longest(source: Source, captions: Captions, statistics: Statistics) -> list[CaptionTokens]:
    found = (_caption(source, int(row["index"]), int(row["number"])) for row in statistics.longest(_LONGEST))
    return [captions(caption) for caption in found if caption is not None]


def _repeated(source: Source, statistics: Statistics) -> list[tuple[str, int]]:
    places = statistics.repeated[:_REPEATED]
    found = ((_caption(source, place.index, place.number), place.count) for place in places)
    return [(caption, count) for caption, count in found if caption is not None]


def _caption(source: Source, index: int, number: int) -> str | None:
    """Returns a caption of a sample; None if the sample cannot be read any more."""
    try:
        return source.read(index).captions[number]
    except (BadSample, IndexError):
        return None


# ------------------------------------------------------------------------------------------------------------ console


def _print_summary(spec: LookSpec, content: Content) -> None:
    from clipx.report.console import stdout_console, text_table

    found = content.statistics
    exact, near = (sum(len(group) - 1 for group in groups) for groups in (found.exact_groups, found.near_groups))
    captions, cut = len(found.captions), int(found.cut.sum())
    rows = [
        ("samples read", f"{found.seen:,}", ""),
        ("unusable", f"{found.bad:,}", percent(found.bad, found.seen)),
        ("exact duplicates", f"{exact:,}", percent(exact, len(found.samples))),
        ("near duplicates", f"{near:,}", percent(near, len(found.samples))),
        ("captions", f"{captions:,}", ""),
        (f"cut off at {found.context} tokens", f"{cut:,}", percent(cut, captions)),
        *((f"in {script.name} script", f"{script.captions:,}", percent(script.captions, captions))
          for script in found.scripts[:3]),
    ]  # fmt: skip
    console = stdout_console()
    console.print(text_table(("", "number", "share"), rows, content.title, right=("number", "share")))
    for item in content.findings:
        _warn(item)
    console.print(f"written to {spec.out}")


def _warn(finding: Finding) -> None:
    print_stderr(f"warning: {finding}")


main = cli(look, "look", unused=UNUSED)
