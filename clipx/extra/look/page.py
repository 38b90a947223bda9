"""Writes an HTML page about a data set as training reads it: `python -m clipx.look data=…`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from clipx.command_spec import UNUSED
from clipx.config.saved import to_dict
from clipx.data.images import reader_of
from clipx.data.loader import TrainBatches
from clipx.data.order import SourceCount
from clipx.data.source import count_reasons
from clipx.data.spec import Dataset, DataSpec, non_default_values, training_order
from clipx.data.texts import TextReader, used_mask
from clipx.extra.look.command import LookSpec
from clipx.extra.look.duplicates import NEAR_BITS, Numbers, exact_duplicates, groups_of, near_duplicates
from clipx.extra.look.measure import measure
from clipx.extra.look.pictures import Pictures, bars, histogram, percent, user_text
from clipx.report.page import Cell, details, facts, listing, page, paragraph, section, table, text

_DRAWN, _REPEATED, _LONGEST, _CLASSES, _MORE_CLASSES = 3, 15, 5, 20, 1000  # most samples, captions and classes shown
_SHEET = 48  # samples of the contact sheet
_GROUPS, _MEMBERS = 12, 6  # groups of duplicates of each kind, and members of each, that are shown
_ASPECTS = {"below 1:3": 1 / 3, "1:3 to 1:2": 1 / 2, "1:2 to 2:3": 2 / 3, "2:3 to 4:5": 4 / 5, "4:5 to 5:4": 5 / 4}
_ASPECTS |= {"5:4 to 3:2": 3 / 2, "3:2 to 2:1": 2, "2:1 to 3:1": 3, "3:1 and above": float("inf")}
_QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "99%": 0.99, "max": 1.0}


class LookPage:
    """Page as `html`, and what the command prints: `findings` (what, what to do) and `rows` (name, number, share)."""

    def __init__(self, spec: LookSpec, data: DataSpec, dataset: Dataset) -> None:
        """Reads the samples."""
        self.spec, self.data, self.dataset = spec, data, dataset
        order, tokenizer = training_order(self.data, dataset, spec.seed, ranks=1), spec.model.text.build_tokenizer()
        images = reader_of(spec.model.image, self.data)
        texts = TextReader(tokenizer, mask=used_mask(self.data.caption_mask))
        stream = TrainBatches(dataset.train, order, images, texts, spec.seed)
        self.pictures, self.context = Pictures(stream, self.data.max_pixels), tokenizer.context_length
        positions, sheet = (range(min(number, order.samples)) for number in (spec.samples, _SHEET))
        self.found = measure(stream, self.data.max_pixels, positions, self.data.loader_processes())
        seen = len(self.found.samples) + len(self.found.bad)
        self.title = f"{self.data.name}: {seen:,} of {order.samples:,} training samples"
        self.findings, self.rows = list[tuple[str, str]](), [("samples read", f"{seen:,}", "")]
        sources = self._sources(order.source_counts(len(positions)), len(positions))
        last = [self._unusable(seen), self._duplicates()]
        parts = [self._sheet(sheet), self._draws(), sources, self._sizes(), self._captions(), self._classes(), *last]
        keys = {key: value for key, value in to_dict(spec).items() if key not in ("kind", *UNUSED)}
        lines = yaml.dump(keys, sort_keys=False, allow_unicode=True, width=120).splitlines()
        parts.append(section("Configuration", details("all keys of the command", listing(lines))))
        items = "".join(f"<li><b>{text(what)}</b>: {text(fix)}</li>\n" for what, fix in self.findings)
        none = paragraph("None: no statistic below is beyond its limit.")
        findings = section("Findings", f'<ul class="findings">\n{items}</ul>' if items else none)
        self.html = page(self.title, "".join([facts(self._about(seen)), findings, *parts]), styles=("look.css",))

    def _state(self, count: int, total: int, what: str, limit: float, fix: str, row: str = "") -> str:
        """Returns `12 of 2,000 samples (0.6 %) are …`, a finding if the share is above the limit.

        `what`: `samples are …`. `row`: the name of the number in the table.
        """
        noun, _, rest = what.partition(" ")
        stated = f"{count:,} of {total:,} {noun} ({percent(count, total)}) {rest}"
        if count > limit * total:
            self.findings.append((stated, fix))
        self.rows += [(row, f"{count:,}", percent(count, total))] if row else []
        return f"{stated}. "

    def _about(self, seen: int) -> list[tuple[str, str]]:
        """Returns the facts at the head of the page."""
        dataset, data, words, size = self.dataset, self.data, self.spec.model.text, self.spec.model.image.size
        total, held_out = sum(dataset.train.sizes), 0 if dataset.held_out is None else sum(dataset.held_out.sizes)
        published = "" if dataset.published is None else f", {dataset.published:,} published"
        read = f"{seen:,} of {total:,} training samples: those that training with seed={self.spec.seed} reads first"
        tokens = f"at most {words.context_length:,} tokens{_set(dict(non_default_values(data, ('caption_mask',))))}"
        return [
            ("data", f"{data.name} ({data.kind}), fingerprint {dataset.train.fingerprint}"),
            ("samples", f"{total:,} for training{published}, {held_out:,} held out"),
            ("statistics", f"of {f'all {total:,} training samples' if seen == total else read}"),
            ("model", self.spec.model.name),
            ("images", f"{size} x {size} pixels{_set(data.view_options())}"),
            ("captions", f"model.text.tokenizer={words.tokenizer_place}, {tokens}"),
            *(("note", note) for note in dataset.notes),
        ]

    def _sheet(self, positions: range) -> str:
        about = (
            "The first samples of training, after the random crop and with the caption that was drawn. A caption opens "
            "to its tokens: start and end are grey, those beyond the context are struck through and not read."
        )
        return section("Contact sheet", paragraph(about), self.pictures.sheet(positions)) if positions else ""

    def _draws(self) -> str:
        """Returns the draws of the first usable samples with several captions, and then of those with one."""
        about = (
            "The whole image, then what six epochs read of it. Of several captions, one is drawn each time. Narrow "
            "data.crop_scale if the crops miss what the captions describe."
        )
        rows = sorted(self.found.samples[:10_000], key=lambda row: bool(row["captions"] < 2))[:_DRAWN]
        shown = [self.pictures.draws(int(row["position"]), int(row["index"])) for row in rows]
        return section("Draws of one sample", paragraph(about), *shown) if rows else ""

    def _sources(self, counts: Mapping[str, SourceCount], number: int) -> str:
        about = f"The first {number:,} samples of training by source; data.sources.NAME.weight sets the shares."
        drawn = ((name, of.size, of.samples) for name, of in counts.items())
        rows = ((name, _number(size), _number(n), percent(n, number)) for name, size, n in drawn)
        names = "source", "samples in it", "drawn", "share of batches"
        return section("Sources", paragraph(about), table(names, rows, numbers=3)) if counts else ""

    def _sizes(self) -> str:
        samples, size, total = self.found.samples, self.spec.model.image.size, len(self.found.samples)
        if not total:
            return ""
        width, height, encoded, unit = samples["width"], samples["height"], samples["bytes"], "bytes"
        if np.median(encoded) >= 20_000:
            encoded, unit = encoded // 1000, "kB"
        sides, aspects, pixels = np.minimum(width, height), width / height, width * height
        what = f"images have a side below model.image.size={size} and are enlarged"
        fix = f"give data.min_side={size} to skip them, or a smaller model.image.size"
        about = self._state(int((sides < size).sum()), total, what, 0.1, fix)
        plain = np.ptp(samples["colours"].reshape(total, -1, 3), axis=1).max(axis=1) <= 4
        what, fix = "images are of one colour", "remove them: web servers send such images in place of deleted ones"
        about += self._state(int(plain.sum()), total, what, 0.005, fix)
        what = "images have a side more than 2 times as long as the other, and a crop contains only a part of them"
        fix = "pad them to squares by clipx.prepare resize=border"
        about += self._state(int((np.maximum(aspects, 1 / aspects) > 2).sum()), total, what, 0.1, fix)
        if (times := float(np.median(pixels)) / size**2) > 16:
            what = f"the median image has {times:,.0f} times the pixels of model.image.size={size}: decoding takes time"
            fix = f"store smaller ones, by clipx.prepare resize=keep_ratio size={-(-size * 8 // 7)}"
            self.findings.append((what, fix))
        of_aspect = np.bincount(np.digitize(aspects, [*_ASPECTS.values()]), minlength=len(_ASPECTS))
        names, counts = np.unique(samples["format"], return_counts=True)
        formats = zip(np.char.decode(names), counts, strict=True)
        rows = {"width, pixels": width, "height, pixels": height, "shorter side, pixels": sides}
        rows |= {"kilopixels": pixels // 1000, f"encoded size, {unit}": encoded}
        shown = histogram("Shorter side, pixels", sides) + histogram(f"Encoded size, {unit}", encoded)
        shown += bars("Width : height", zip(_ASPECTS, of_aspect, strict=True), total) + bars("Format", formats, total)
        return section("Sizes of images", paragraph(about), f'<div class="counts">{shown}</div>', _quantiles(rows))

    def _captions(self) -> str:
        captions, context, total = self.found.captions, self.context, len(self.found.captions)
        tokens = np.array([caption.tokens for caption in captions])
        self.rows += [("captions", f"{total:,}", "")]
        enough = int(np.quantile(tokens, 0.99, method="higher")) if total else 0
        what, fix = f"cut off at {context} tokens", "holds 99% of them, or shorten them"
        fix = f"model.text.context_length={enough} {fix}"
        about = self._state(int((tokens > context).sum()), total, f"captions are {what}", 0.02, fix, what)
        if not total:
            return ""
        empty = int((tokens <= len(self.pictures.tokenizer.encode(""))).sum())
        about += self._state(empty, total, "captions have no token", 0, "remove these captions")
        lengths = {"tokens": tokens, "characters": np.array([len(caption.words) for caption in captions])}
        counts = histogram(f"Tokens; red: cut off beyond {context}", tokens, context) + self._scripts()
        counts += histogram("Characters", lengths["characters"]) + self._repeated()
        first = {caption.tokens: caption for caption in reversed(captions) if caption.tokens > context}
        shown = [self.pictures.caption(first[n].words, first[n].sample) for n in sorted(first, reverse=True)[:_LONGEST]]
        longest = f'<h3>Longest captions, one of each length</h3><div class="long">{"".join(shown)}</div>'
        parts = f'<div class="counts">{counts}</div>', _quantiles(lengths), longest if shown else ""
        return section("Captions", paragraph(about), *parts)

    def _scripts(self) -> str:
        found, total = dict[str, list[int]](), len(self.found.captions)
        for caption in self.found.captions:
            found.setdefault(caption.script, []).append(caption.tokens)
        scripts = sorted(found, key=lambda script: (-len(found[script]), script))
        numbers = {script: len(found[script]) for script in scripts}
        self.rows += [(f"in {of} script", f"{numbers[of]:,}", percent(numbers[of], total)) for of in scripts[:3]]
        if others := [script for script in scripts if script not in ("Latin", "no letters")]:
            means = [f"{np.mean(found[others[0]]):.0f} tokens on average in {others[0]} script"]
            means += [f"{np.mean(found['Latin']):.0f} in Latin script"] if "Latin" in found else []
            what = "captions are not in Latin script, and the vocabulary of model.text.tokenizer=clip is English"
            fix = "give a multilingual tokenizer, model.text.tokenizer=tokenizer.json with its model.text.vocabulary"
            limit = 0.1 if self.spec.model.text.tokenizer_place == "clip" else 1
            self._state(sum(numbers[script] for script in others), total, f"{what} ({', '.join(means)})", limit, fix)
        cut = {of: percent(sum(n > self.context for n in found[of]), numbers[of]) for of in scripts}
        rows = [(f"{of}: {np.mean(found[of]):.1f} tokens, {cut[of]} cut off", numbers[of]) for of in scripts]
        return bars("Script of most letters, a hint at the language; tokens on average", rows, total)

    def _repeated(self) -> str:
        counts = Counter(of.words for of in self.found.captions)
        total, batch = counts.total(), self.data.batch_size
        same = (batch - 1) * sum(count * (count - 1) for count in counts.values()) / max(1, total * (total - 1))
        often, several = counts.most_common(_REPEATED), sum(count > 1 for count in counts.values())
        if same >= 1 and self.dataset.classes is None:  # captions of class names are equal by intent
            what = f"in a batch of data.batch_size={batch:,}, a caption has on average {same:.1f} others with the same "
            what += f"text (the most frequent occurs {often[0][1]:,} times in {total:,} captions), which the loss "
            what += "treats as negatives"
            self.findings.append((what, "remove repeated captions, or use a smaller batch"))
        shown = [(f"<bdi>{user_text(words)}</bdi>", count) for words, count in often if count > 1]
        title = f"Most frequent of {len(counts):,} different captions; {several:,} occur more than once"
        return bars(title, shown, total)

    def _classes(self) -> str:
        names = self.dataset.classes.names if self.dataset.classes else ()
        labels = {label: n for label, n in self.found.labels.items() if label is not None}
        known = {label: f"label {label}" if isinstance(label, int) else label for label in labels}
        known.update(enumerate(names))
        counts = [(known[label], n) for label, n in labels.items()]
        rows = [(text(name), count) for name, count in sorted(counts, key=lambda row: (-row[1], row[0]))]
        if not rows:
            return ""
        total, rest = sum(count for _, count in rows), rows[_CLASSES:]
        of = f", of {len(names):,} classes with a name" if names else ""
        about = f"{len(rows):,} classes occur in {total:,} samples with a label{of}. The rarest of them has "
        about += f"{rows[-1][1]:,} samples, the most frequent {rows[0][1]:,}."
        more = details(f"{len(rest):,} more classes", bars("", rest[:_MORE_CLASSES], total)) if rest else ""
        return section("Classes", paragraph(about), bars("", rows[:_CLASSES], total), more)

    def _duplicates(self) -> str:
        samples, total = self.found.samples, len(self.found.samples)
        first = exact_duplicates(samples["digest"])
        distinct = np.flatnonzero(first == np.arange(total))  # of equal files, only the first can be a near duplicate
        near = near_duplicates(samples["hash"][distinct], samples["colours"][distinct])
        parts, fix = list[str](), "remove them, or store one image with several captions"
        about = "The SHA-256 of their files are equal."
        for kind, groups in (
            ("exact", groups_of(first)),
            ("near", [distinct[group].tolist() for group in groups_of(near)]),
        ):
            copies, what = sum(map(len, groups)) - len(groups), f"samples are {kind} duplicates of another one"
            stated = self._state(copies, total, what, 0.01, fix, f"{kind} duplicates")
            parts += [paragraph(f"{stated}Groups: {len(groups):,}. {about}"), self._groups(groups)]
            fix = "check the groups; remove copies before the held-out part is split off, or they leak into it"
            about = f"At most {NEAR_BITS} of 64 bits of their difference hashes differ, and their "
            about += "colours are similar. Resized and recompressed copies are found, crops and mirror images are not."
        return section("Duplicates", *parts) if total else ""

    def _groups(self, groups: Sequence[Sequence[int]]) -> str:
        """Returns the largest groups of rows of samples."""
        shown = list[str]()
        for group in groups[:_GROUPS]:
            tiles = self.pictures.thumbnails(self.found.samples["index"][group[:_MEMBERS]].tolist())
            rest = f"<small>and {len(group) - _MEMBERS:,} more</small>" if len(group) > _MEMBERS else ""
            shown.append(f'<div class="group">{tiles}{rest}</div>\n')
        more = paragraph(f"The {_GROUPS} largest of {len(groups):,} groups are shown.") if len(groups) > _GROUPS else ""
        return f'<div class="groups">\n{"".join(shown)}</div>{more}' if shown else ""

    def _unusable(self, seen: int) -> str:
        read, opened, limit = self.found.bad, self.dataset.train.bad, self.data.max_bad_share
        fix = "training replaces them by other samples; convert or remove them"
        if len(read) > limit * seen:
            fix = f"training ends with an error above data.max_bad_share={limit:g}; convert, correct or remove them"
        why, early = ("; ".join(count_reasons(records, 1)) for records in (read, opened))
        about = self._state(len(read), seen, f"samples cannot be used{why and f' ({why})'}", 0, fix, "unusable")
        parts = [listing(count_reasons(read, 100))] if read else []
        if opened:
            what = f"{len(opened):,} entries of the data are not used at all ({early})"
            self.findings.append((what, "see the unusable samples on the page"))
            parts += [paragraph("Found on opening, in the whole set:"), listing(count_reasons(opened, 100))]
        return section("Unusable samples", paragraph(about), *parts)


def _quantiles(rows: Mapping[str, Numbers]) -> str:
    """Returns a table of quantiles by name."""
    levels = [*_QUANTILES.values()]
    cells = {name: np.quantile(values, levels, method="nearest").tolist() for name, values in rows.items()}
    return table(("", *_QUANTILES), ([name, *map(_number, of)] for name, of in cells.items()), numbers=len(levels))


def _number(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def _set(options: Mapping[str, Any]) -> str:
    """Returns options of the data as on the command line."""
    return "".join(f", data.{key}={value}" for key, value in options.items())
