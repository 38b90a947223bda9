"""The page: sections of the contact sheet, images, captions, duplicates and unusable samples. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clipx.data.look.charts import bars, bins, histogram
from clipx.data.look.findings import Finding, percent
from clipx.data.look.hashing import MOST_COLOUR, Numbers
from clipx.data.look.measure import FORMATS, MOST_CAPTIONS
from clipx.data.look.pictures import LOSSLESS, CaptionTokens, Draws, Tile
from clipx.data.look.statistics import Reason, Statistics
from clipx.escape import escaped
from clipx.report.page import Cell, details, facts, page, paragraph, section, table, text

_ASPECTS = (
    ("below 1:3", 0, 1 / 3),
    ("1:3 to 1:2", 1 / 3, 1 / 2),
    ("1:2 to 2:3", 1 / 2, 2 / 3),
    ("2:3 to 4:5", 2 / 3, 4 / 5),
    ("4:5 to 5:4", 4 / 5, 5 / 4),
    ("5:4 to 3:2", 5 / 4, 3 / 2),
    ("3:2 to 2:1", 3 / 2, 2),
    ("2:1 to 3:1", 2, 3),
    ("3:1 and above", 3, np.inf),
)
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 0.99, 1.0)
_JOINERS = "\u200c\u200d"  # parts of the writing of Persian, Indian scripts and emoji
_MOST_CLASSES = 20


@dataclass(frozen=True, slots=True)
class Group:
    """Group of duplicates: thumbnails of its first members with a caption each, and the number of all members."""

    tiles: Sequence[Tile]
    members: int


@dataclass(frozen=True, slots=True)
class SourceRow:
    """Source of a mixture: its name, samples in it, and samples drawn from it among the positions of the page."""

    name: str
    size: int
    drawn: int


@dataclass(frozen=True, slots=True)
class Content:
    """Everything on the page. `classes`: names by label. `error`: the reason why the contact sheet ends early."""

    title: str
    about: Sequence[tuple[str, str]]
    findings: Sequence[Finding]
    statistics: Statistics
    image_size: int
    sheet: Sequence[Tile]
    error: str
    draws: Sequence[Draws]
    exact: Sequence[Group]
    near: Sequence[Group]
    longest: Sequence[CaptionTokens]
    repeated: Sequence[tuple[str, int]]
    classes: Sequence[str]
    sources: Sequence[SourceRow]
    positions: int
    configuration: str


def look_page(content: Content) -> str:
    """Returns the page."""
    parts = [
        facts(content.about),
        _findings(content.findings),
        _sheet(content),
        _draws(content),
        _sources(content),
        _images(content),
        _captions(content),
        _classes(content),
        _duplicates(content),
        _unusable(content.statistics),
        section("Configuration", details("all keys of the command", f"<pre>{_lines(content.configuration)}</pre>")),
    ]
    return page(content.title, "".join(parts), styles=("look.css",))


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return section("Findings", paragraph("None: no statistic below is beyond its limit."))
    items = "".join(f"<li><b>{text(item.what)}</b>: {text(item.fix)}</li>\n" for item in found)
    return section("Findings", f'<ul class="findings">\n{items}</ul>')


# ----------------------------------------------------------------------------------------------------- contact sheet


def _sheet(content: Content) -> str:
    if not (content.sheet or content.error):
        return ""
    about = (
        "The first samples of training, after the random crop and with the caption that was drawn. A caption opens its "
        "tokens: start and end token are grey, tokens beyond the context are struck through and not read."
    )
    error = paragraph(f"The samples end here: {content.error}") if content.error else ""
    return section("Contact sheet", paragraph(about), _grid(content.sheet, content.image_size), error)


def _grid(tiles: Iterable[Tile], size: int) -> str:
    small = " small" if size <= LOSSLESS else ""
    return f'<div class="tiles{small}">\n{"".join(map(_tile, tiles))}</div>'


def _tile(tile: Tile) -> str:
    picture = f'<img src="{tile.picture}" alt="" loading="lazy">' if tile.picture else '<div class="gone"></div>'
    remark = f'<div class="remark">{text(tile.remark)}</div>' if tile.remark else ""
    caption = "" if tile.caption is None else _caption(tile.caption)
    return f'<figure title="{text(tile.key)}">{picture}{remark}{caption}</figure>\n'


def _caption(caption: CaptionTokens) -> str:
    cut = f', <b class="bad">{caption.cut:,} cut off</b>' if caption.cut else ""
    return (
        f'<details class="caption"><summary><bdi>{user_text(caption.caption)}</bdi>'
        f"<small>{caption.count:,} tokens{cut}</small></summary>{_tokens(caption)}</details>"
    )


def _tokens(caption: CaptionTokens) -> str:
    kinds = ("t special" if t.special else "t cut" if t.cut else "t" for t in caption.tokens)
    shown = " ".join(
        f'<span class="{kind}">{user_text(t.text)}</span>' for kind, t in zip(kinds, caption.tokens, strict=True)
    )
    rest = caption.count - len(caption.tokens)
    return f'<p class="tokens">{shown}{f" and {rest:,} more" if rest else ""}</p>'


def user_text(value: str) -> str:
    """Returns a caption for HTML: as `text`, with the joiners that several scripts are written with."""
    return html.escape(escaped(value, _JOINERS))


def _draws(content: Content) -> str:
    if not content.draws:
        return ""
    about = (
        "The whole image, then what six epochs read of it. Of several captions, one is drawn each time. Narrow "
        "data.crop_scale if the crops miss what the captions describe."
    )
    rows = []
    for found in content.draws:
        number = f"{found.captions} caption{'s' if found.captions != 1 else ''}"
        rows.append(f'<h3>{text(found.whole.key)}<span class="muted">, {number}</span></h3>')
        rows.append(_grid([found.whole, *found.draws], content.image_size))
    return section("Draws of one sample", paragraph(about), *rows)


# ------------------------------------------------------------------------------------------------- images and captions


def _images(content: Content) -> str:
    found = content.statistics
    if not len(found.samples):
        return ""
    size = content.image_size
    sides = found.shorter_sides
    small = int((sides < size).sum())
    aspects = [(name, int(((found.aspects >= low) & (found.aspects < high)).sum())) for name, low, high in _ASPECTS]
    formats = [(name, int((found.samples["format"] == number).sum())) for number, name in enumerate(FORMATS)]
    pixels = found.samples["width"] * found.samples["height"]
    unit, encoded = _encoded_sizes(found.samples["bytes"])
    quantities = [
        ("width, pixels", found.samples["width"]),
        ("height, pixels", found.samples["height"]),
        ("shorter side, pixels", sides),
        ("kilopixels", pixels // 1000),
        (f"encoded size, {unit}", encoded),
    ]
    total = len(found.samples)
    return section(
        "Sizes of images",
        paragraph(
            f"{small:,} of {total:,} images ({percent(small, total)}) have a shorter side below "
            f"model.image.size={size} and are enlarged. {found.plain:,} are of one colour."
        ),
        '<div class="panels">',
        histogram("shorter side", "pixels", bins(sides)),
        histogram("encoded size", unit, bins(encoded)),
        f"<figure><figcaption>width : height</figcaption>{bars(aspects, total)}</figure>",
        f"<figure><figcaption>format</figcaption>{bars([row for row in formats if row[1]], total)}</figure>",
        "</div>",
        _quantiles(quantities),
    )


def _encoded_sizes(sizes: Numbers) -> tuple[str, Numbers]:
    """Returns (unit, sizes in it) for numbers of bytes."""
    return ("kB", sizes // 1000) if np.median(sizes) >= 20_000 else ("bytes", sizes)


def _captions(content: Content) -> str:
    found = content.statistics
    total = len(found.captions)
    if not total:
        return ""
    cut, context = int(found.cut.sum()), found.context
    parts = [
        paragraph(
            f"{cut:,} of {total:,} captions ({percent(cut, total)}) are cut off at model.text.context_length={context}."
            f" {found.without_tokens:,} have no token. {found.distinct_captions:,} are different from each other. The "
            f"first {MOST_CAPTIONS} captions of a sample are counted."
        ),
        '<div class="panels">',
        histogram("tokens", "tokens", bins(found.captions["tokens"], context), context, f"cut off beyond {context}"),
        histogram("characters", "characters", bins(found.captions["characters"])),
        "</div>",
        _quantiles([("tokens", found.captions["tokens"]), ("characters", found.captions["characters"])]),
        "<h3>Scripts</h3>",
        paragraph("The Unicode script of most letters of a caption, a hint at its language."),
        table(
            ("script", "captions", "share", "tokens, mean", "cut off"),
            (
                (
                    script.name,
                    Cell(f"{script.captions:,}", script.captions),
                    Cell(percent(script.captions, total), script.captions),
                    f"{script.mean_tokens:.1f}",
                    Cell(percent(script.cut, script.captions), script.cut / script.captions),
                )
                for script in found.scripts
            ),
            numbers=4,
        ),
    ]
    if content.repeated:
        rows = "".join(
            f'<tr><td><bdi>{user_text(caption)}</bdi></td><td class="n">{count:,}</td>'
            f'<td class="n">{percent(count, total)}</td></tr>\n'
            for caption, count in content.repeated
        )
        head = '<thead><tr><th>caption</th><th class="n">times</th><th class="n">share</th></tr></thead>'
        about = f"{len(found.repeated):,} captions occur more than once."
        parts += ["<h3>Most frequent captions</h3>", paragraph(about)]
        parts.append(f'<div class="scroll"><table>{head}<tbody>\n{rows}</tbody></table></div>')
    if content.longest:
        parts.append("<h3>Longest captions</h3>")
        parts += [f'<div class="long">{_caption(caption)}</div>' for caption in content.longest]
    return section("Captions", *parts)


def _quantiles(quantities: Sequence[tuple[str, Numbers]]) -> str:
    names = ("", "smallest", "5 %", "median", "95 %", "99 %", "largest")
    rows = [
        (name, *(f"{int(value):,}" for value in np.quantile(values, _QUANTILES, method="nearest")))
        for name, values in quantities
    ]
    return table(names, rows, numbers=len(_QUANTILES))


def _classes(content: Content) -> str:
    counts = content.statistics.labels
    named = [(_class_name(label, content.classes), count) for label, count in counts.items() if label is not None]
    if not named:
        return ""
    rows = sorted(named, key=lambda row: (-row[1], row[0]))
    total = sum(count for _, count in rows)
    about = f"{len(rows):,} classes occur in {total:,} samples with a label"
    if content.classes:
        about = f"{about}, of {len(content.classes):,} classes with a name"
    parts = [paragraph(f"{about}. The rarest of them has {rows[-1][1]:,} samples, the most frequent {rows[0][1]:,}.")]
    parts.append(bars(rows[:_MOST_CLASSES], total))
    if rest := rows[_MOST_CLASSES:]:
        parts.append(details(f"{len(rest):,} more classes", bars(rest[:1000], total)))
    return section("Classes", *parts)


def _class_name(label: int | str, names: Sequence[str]) -> str:
    if isinstance(label, str):
        return label
    return names[label] if 0 <= label < len(names) else f"label {label}"


def _sources(content: Content) -> str:
    if not content.sources:
        return ""
    rows = [
        (
            source.name,
            Cell(f"{source.size:,}", source.size),
            Cell(f"{source.drawn:,}", source.drawn),
            Cell(percent(source.drawn, content.positions), source.drawn),
        )
        for source in content.sources
    ]
    about = f"The first {content.positions:,} samples of training by source; data.sources.NAME.weight sets the shares."
    return section(
        "Sources", paragraph(about), table(("source", "samples in it", "drawn", "share of batches"), rows, numbers=3)
    )


# ----------------------------------------------------------------------------------------- duplicates, unusable samples


def _duplicates(content: Content) -> str:
    found = content.statistics
    if not len(found.samples):
        return ""
    exact, near = (sum(len(group) - 1 for group in groups) for groups in (found.exact_groups, found.near_groups))
    total = len(found.samples)
    return section(
        "Duplicates",
        paragraph(
            f"{exact:,} of {total:,} samples ({percent(exact, total)}) have the same file as an earlier one, by its "
            f"SHA-256, in {len(found.exact_groups):,} groups."
        ),
        *_groups(content.exact, len(found.exact_groups)),
        paragraph(
            f"{near:,} further samples ({percent(near, total)}) have nearly the same picture as an earlier one, in "
            f"{len(found.near_groups):,} groups: at most {found.near_bits} of 64 bits of the difference hash differ "
            f"(near_bits={found.near_bits}), and the mean colours of 8 x 8 areas by at most {MOST_COLOUR:g} of their "
            "standard deviation. Resized and recompressed copies are found, crops and mirror images are not."
        ),
        *_groups(content.near, len(found.near_groups)),
    )


def _groups(groups: Sequence[Group], total: int) -> list[str]:
    shown = []
    for group in groups:
        rest = group.members - len(group.tiles)
        more = f'<div class="more muted">and {rest:,} more</div>' if rest else ""
        shown.append(f'<div class="group">{"".join(map(_tile, group.tiles))}{more}</div>\n')
    if total > len(groups):
        shown.append(paragraph(f"The {len(groups):,} largest groups of {total:,} are shown."))
    return [f'<div class="groups">\n{"".join(shown)}</div>'] if shown else []


def _unusable(found: Statistics) -> str:
    if not (found.bad or found.opened):
        return section("Unusable samples", paragraph(f"None among the {found.seen:,} samples that were read."))
    about = (
        f"{found.bad:,} of the {found.seen:,} samples that were read ({percent(found.bad, found.seen)}) cannot be "
        "used. The reasons are those of quarantine.jsonl in a run directory."
    )
    read = [_reason(reason, "reading") for reason in found.read]
    opened = [_reason(reason, "opening, whole set") for reason in found.opened]
    columns = ("reason", "found on", "examples", "samples")
    return section("Unusable samples", paragraph(about), table(columns, [*read, *opened], numbers=1))


def _reason(reason: Reason, when: str) -> tuple[str | Cell, ...]:
    examples = ", ".join(reason.examples) + (" …" if reason.samples > len(reason.examples) else "")
    return reason.text, when, examples, Cell(f"{reason.samples:,}", reason.samples)


def _lines(configuration: str) -> str:
    return "\n".join(map(text, configuration.splitlines()))


def write(path: str, content: Content) -> None:
    """Writes the page to a file."""
    Path(path).write_text(look_page(content), encoding="utf-8")
