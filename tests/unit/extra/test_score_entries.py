"""The score `entries`: the entries of a metadata list that captions contain, and their counts."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from clipx.extra.curate.entries import Entries, read_entries


def contained(text: str, entries: list[str]) -> list[int]:
    """The definition: punctuation between spaces, then a search for each entry between spaces."""
    spaced = f" {text} "
    for mark in (",", ".", ";", ":", "?", "!", "`"):
        spaced = spaced.replace(mark, f" {mark} ")
    for white in "\t\n\r":
        spaced = spaced.replace(white, " ")
    return [number for number, entry in enumerate(entries) if f" {entry} " in spaced]


def test_matches_equal_a_search_for_each_entry() -> None:
    """All entries of up to four of eight signs, in texts of up to 20 of these and of other signs."""
    signs = ["a", "b", "A", " ", "  ", ".", "é", "-"]
    entries = ["".join(word) for count in range(1, 5) for word in itertools.product(signs, repeat=count)]
    entries = sorted({entry for entry in entries if entry.strip()})
    found, rng = Entries.of(entries), random.Random(0)
    matched = 0
    for _ in range(100):
        text = "".join(rng.choice([*signs, " ", "\t", "\n", "!", "c"]) for _ in range(rng.randrange(20)))
        expected = contained(text, entries)
        assert found.match([text]) == expected, text
        matched += len(expected)
    assert matched > 500


def test_a_line_and_an_item_of_json_have_the_number_of_their_place(tmp_path: Path) -> None:
    texts = ["dog", "", "New York", "dog", "sea\u2028side"]
    (tmp_path / "list.json").write_text(json.dumps(texts))
    (tmp_path / "list.txt").write_bytes("\r\n".join([*texts, ""]).encode())
    for name in ("list.json", "list.txt"):
        entries = read_entries(str(tmp_path / name))
        assert entries.texts == texts
        assert entries.match(["a dog in New York.", "New\nYork, sea\u2028side"]) == [0, 2, 4]
    assert read_entries(str(tmp_path / "list.json")).digest == read_entries(str(tmp_path / "list.txt")).digest


MEASURED = """
import random, sys, time
from clipx.extra.curate.entries import Entries

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

rng = random.Random(0)
words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 10))) for _ in range(200_000)]
lengths = rng.choices([1, 2, 3, 4, 5, 8], [30, 40, 15, 10, 4, 1], k=900_000)
entries = list(dict.fromkeys(" ".join(words[int(rng.random() ** 2 * 200_000)] for _ in range(n)) for n in lengths))[:500_000]
captions = [" ".join(words[int(200_000 ** rng.random()) - 1] for _ in range(rng.randint(2, 20))) for _ in range(50_000)]
before = resident()
found = Entries.of([text.encode().decode() for text in entries])
memory, start = resident() - before, time.process_time()
matches = sum(len(found.match([caption])) for caption in captions)
rate = len(captions) / (time.process_time() - start)
print(f"{len(entries)} entries: {memory:.0f} MiB; {rate:.0f} captions/s, {matches / len(captions):.1f} entries each")
"""


@pytest.mark.number
def test_half_a_million_entries_take_less_than_150_mib() -> None:
    """Prints the captions that a core matches per second."""
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True).stdout
    print(done)
    assert done.startswith("500000 entries") and float(done.split()[2]) < 150
