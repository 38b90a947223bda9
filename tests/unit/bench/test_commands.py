"""The benchmark commands as users type them, at sizes that take little time. No test judges a duration."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.runs import compose, run

from clipx.bench.spec import BenchSpec
from clipx.config.registry import CONF_DIR

BENCH = (sys.executable, "-m", "clipx.bench")
NAMES = sorted(path.stem for path in (CONF_DIR / "bench").glob("*.yaml"))


def bench(folder: Path, *words: str) -> tuple[dict, dict, str]:
    """Runs a benchmark. Returns the figures of the last line, results.json, and its output."""
    done = run(*BENCH, *words, "device=cpu", "threads=1", f"run_dir={folder}")
    assert "Warning" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]), json.loads((folder / "results.json").read_text()), done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_composes_with_its_keys_at_the_top_level(name: str) -> None:
    spec = compose(f"bench={name}", "device=cpu", config_name="bench")
    assert isinstance(spec, BenchSpec)
    assert (spec.kind, spec.device) == (name, "cpu")
    assert re.fullmatch(rf"outputs/bench-{name}-\d{{8}}-\d{{6}}", spec.run_dir)


@pytest.mark.slow
def test_loss_compares_time_memory_and_traffic(tmp_path: Path) -> None:
    sizes = ("batch=64", "dim=16", "small=16", "ranks=[2]", "repeats=2")
    figures, results, printed = bench(tmp_path / "out", "loss", *sizes)
    assert set(figures) >= {"memory_ratio", "time_ratio", "plain_memory_ratio", "plain_time_ratio"}
    assert figures["loss_error"] < 1e-5 and figures["gradient_error"] < 1e-4

    x_bD = 16 * 16 * 4  # size of one side's features in bytes
    ours, theirs, plain = (figures["collectives"][name] for name in ("infonce", "open_clip", "open_clip_plain"))
    assert list(ours) == ["all_gather"]  # no reduce and no scatter
    assert 2 * x_bD < ours["all_gather"]["sent"] < 2.5 * x_bD  # the features and a few numbers per sample
    assert figures["moves_gradients"] == {"infonce": False, "open_clip": True, "open_clip_plain": False}
    assert theirs["all_gather"] == {"calls": 2, "sent": 2 * x_bD, "received": 4 * x_bD} == plain["all_gather"]
    assert theirs["scatter"] == {"calls": 4, "sent": 4 * x_bD, "received": 4 * x_bD}  # gloo's reduce_scatter

    for text in ("clipx infonce", "open_clip ClipLoss, local_loss + gather_with_grad", "memory_ratio"):
        assert text in printed
    assert results["figures"] == figures
    assert results["command"].startswith("python -m clipx.bench loss batch=64 dim=16")
    assert results["versions"].keys() == {"python", "torch", "open_clip", "clipx"}
    assert results["machine"]["cores"] >= 1 and results["configuration"]["small"] == 16
    errors = {
        row["point"]["ranks"]: row["gradient_error"] for row in results["details"] if row["name"] == "open_clip_plain"
    }
    assert errors == {1: 0, 2: pytest.approx(0.5)}  # 1/K of the correct gradient

    again = run(*BENCH, "loss", f"run_dir={tmp_path / 'out'}", check=False)
    assert again.stderr == f"error: run_dir={tmp_path / 'out'} already contains results: give another, or remove it\n"
