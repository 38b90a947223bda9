"""The score `entries`: the entries of a metadata list that captions contain, and their counts."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers.runs import compose

from clipx.errors import ConfigError
from clipx.score.__main__ import score
from clipx.score.entries import Entries, read_entries


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


def test_samples_have_the_entries_of_all_their_captions_and_the_counts_of_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Image 0 has two captions, image 2 has no text. Captions are not read from images, which do not exist."""
    rows = ["filepath,caption", "0.png,a dog", '0.png,"the sea, a dog"', "1.png,the dog", "2.png,", "3.png,cats"]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    (tmp_path / "list.txt").write_text("sea\na dog\ndog\nhorse\n\ndog\n")
    words = ("data=csv", f"data.path={tmp_path}/pairs.csv", "data.held_out_share=0", "data.workers=0")
    options = (*words, "scores=[entries]", f"entries={tmp_path}/list.txt", f"out={tmp_path}/out", "samples_per_part=2")
    score(compose(*options, config_name="score"))  # type: ignore[arg-type]
    table = pq.read_table(tmp_path / "out/scores.parquet")
    found = {
        Path(key).stem: row for key, row in zip(table["key"].to_pylist(), table["entries"].to_pylist(), strict=True)
    }
    assert (found["0"], found["1"], found["3"]) == ([0, 1, 2], [2], [])
    assert found.get("2") is None
    counts = pq.read_table(tmp_path / "out/entries.parquet").to_pydict()
    assert counts == {"entry": ["sea", "a dog", "dog", "horse", "", "dog"], "count": [1, 1, 2, 0, 0, 0]}
    assert "3 of 4 entries are matched, 2 further ones are empty or repeated" in capsys.readouterr().out
    assert "entries.parquet" in json.loads((tmp_path / "out/manifest.json").read_text())["files"]
    (tmp_path / "list.txt").write_text("sea\n")
    with pytest.raises(ConfigError, match=r"holds other scores \(entries was"):
        score(compose(*options, config_name="score"))  # type: ignore[arg-type]


MEASURED = """
import random, sys, time
from clipx.score.entries import Entries

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
