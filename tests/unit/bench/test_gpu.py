"""`python -m clipx.bench gpu`: its parts with tiny sizes on the CPU, their limits, and its verdicts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.runs import compose, run
from torch._dynamo.utils import counters

from clipx.bench.gpu import PARTS, GpuSpec, Part
from clipx.bench.gpu_parts import kernels
from clipx.bench.gpu_parts.expected import EXPECTED, expectation
from clipx.bench.gpu_parts.process import Record, measure
from clipx.bench.gpu_parts.report import Report, Sizes, read
from clipx.errors import ConfigError

BENCH = (sys.executable, "-m", "clipx.bench", "gpu")
MAIN = ("kernels", "resume", "vit_b32", "loss", "run")  # parts with code that others do not have


def spec(*words: str) -> GpuSpec:
    found = compose("bench=gpu", *words, config_name="bench")
    assert isinstance(found, GpuSpec)
    return found


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a dry run of MAIN."""
    folder = tmp_path_factory.mktemp("gpu") / "out"
    done = run(*BENCH, "tiny=true", f"run_dir={folder}", f"parts=[{','.join(MAIN)}]")
    return folder, done.stdout


def test_a_dry_run_measures_every_number_of_its_parts(dry: tuple[Path, str]) -> None:
    folder, printed = dry
    records = {name: Record.read(folder, name) for name in MAIN}
    logs = {name: (folder / "parts" / f"{name}.log").read_text()[-2000:] for name in MAIN}
    assert {name: record.status for name, record in records.items()} == dict.fromkeys(MAIN, "done"), logs
    entries = [entry for record in records.values() for entry in record.entries]
    # implementations of CUDA alone
    failed = {entry["name"] for entry in entries if "error" in entry}
    assert failed <= {f"attention B/32 {kind}" for kind in ("flash", "cudnn", "efficient")}
    numbers = {entry["name"]: entry["value"] for entry in entries if "value" in entry}
    assert numbers["B/32 again: tensors that differ"] == numbers["B/32 resumed: tensors that differ"] == 0
    for name in ("patches 16 product", "spread and gather", "loss 16 of 64 infonce"):
        assert numbers[name] >= 0
    assert numbers["step vit_b32 4 clipx / open_clip"] > 0
    assert 0 <= numbers["run: data wait"] <= 1
    assert "expected on H200" in printed


def test_results_have_the_steps_the_parts_and_what_is_missing(dry: tuple[Path, str]) -> None:
    folder, printed = dry
    results = json.loads((folder / "results.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == results["figures"]
    assert results["figures"]["missing"] == [name for name in PARTS if name not in MAIN]
    sides = {step["implementation"] for step in results["details"]["steps"]}
    assert sides == {"clipx", "open_clip"}
    assert {"date", "command", "machine", "versions"} <= results.keys()


def test_a_second_call_continues_with_the_missing_parts(dry: tuple[Path, str]) -> None:
    folder, _ = dry
    for name in PARTS.keys() - set(MAIN):
        Record(name, "done", 1.0, []).write(folder)
    before = Record.path(folder, "kernels").stat().st_mtime_ns
    done = run(*BENCH, "tiny=true", f"run_dir={folder}")
    assert "kernels: measured before" in done.stdout
    assert Record.path(folder, "kernels").stat().st_mtime_ns == before
    assert json.loads(done.stdout.splitlines()[-1])["missing"] == []


def hang(sizes: Sizes, report: Report) -> None:
    report.number("first", 1.0, "ms")
    time.sleep(10_000)


def break_down(sizes: Sizes, report: Report) -> None:
    report.number("first", 1.0, "ms")
    raise ValueError("a broken part")


def test_a_part_beyond_its_limit_is_stopped_and_keeps_its_numbers(tmp_path: Path) -> None:
    lines: list[str] = []
    # Whether the part gets to its first number within the limit is not asserted: the record has what the report has.
    record = measure("slow", Part(f"{__name__}:hang", 3.0), tmp_path, "cpu", 0, True, 100.0, lines.append)
    assert record.status == "stopped after 3 s"
    assert record.entries == read(tmp_path / "parts" / "slow.jsonl") == Record.read(tmp_path, "slow").entries
    assert len([line for line in lines if line == "slow: first: 1 ms"]) == len(record.entries)


def test_a_part_that_fails_is_recorded_with_its_traceback(tmp_path: Path) -> None:
    record = measure("bad", Part(f"{__name__}:break_down", 600.0), tmp_path, "cpu", 0, True, 600.0, lambda text: None)
    assert (record.status, len(record.entries)) == ("failed", 1)
    assert "ValueError: a broken part" in (tmp_path / "parts" / "bad.log").read_text()


def test_patches_of_each_size_are_compiled_with_static_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # which the part sets
    torch._dynamo.reset()
    counters.clear()
    kernels.patches(Sizes("cpu", tmp_path, 0, True), Report(tmp_path / "report.jsonl"))
    products = [entry for entry in read(tmp_path / "report.jsonl") if entry["name"].endswith("product")]
    assert counters["stats"]["unique_graphs"] == len(products) == 3  # the second would have symbolic sizes, for all
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("step vit_b32 2048 clipx / open_clip", 1.6, "as expected"),
        ("step vit_b32 2048 clipx / open_clip", 1.3, "look"),
        ("step vit_b32 2048 clipx / open_clip", 1.1, "read kernels_ms of both rows"),
        ("attention text varlen", 0.5, "as expected"),
        ("attention text varlen", 2.0, "packed attention is worth less than estimated"),
    ],
)
def test_a_verdict_compares_a_number_with_range_and_threshold(name: str, value: float, verdict: str) -> None:
    found = expectation(name)
    assert found is not None
    assert found.verdict(value) == verdict


def test_every_threshold_says_what_to_do() -> None:
    assert all(one.action for one in EXPECTED if one.threshold)
    assert expectation("a number without expectation") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parts=[kernel]"], "parts=kernel is not a part: choose from kernels, resume,"),
        (["minutes=0"], "minutes=0 must be above 0"),
        (["tiny=true", "device=cuda"], "tiny=true is a dry run on the CPU"),
    ],
)
def test_invalid_options_raise_a_one_line_error(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec(*words)
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is visible")
def test_without_a_device_the_error_names_the_dry_run() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device is visible: .* or add tiny=true"):
        spec().run(print)
    with pytest.raises(ConfigError, match=r"device=cpu: this benchmark measures a GPU"):
        spec("device=cpu").run(print)
