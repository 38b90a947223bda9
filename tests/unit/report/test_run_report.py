"""The picture and the HTML page of a run."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipx.report.run_report import draw, write_report

ROWS = [
    {"step": s, "samples": s, "epoch": s, "seconds": s, "train/loss": 5 / s, "train/lr": 1e-3, "train/temperature": 0.07,
     "train/grad_norm": 1.0, "train/samples_per_second": 100.0}
    for s in range(1, 30)
] + [{"step": 29, "eval/zeroshot/top1": 0.9, "eval/zeroshot/chance": 0.1}]  # fmt: skip


def pixels(encoded: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def test_the_picture_shows_the_curves() -> None:
    """Another curve changes the picture, and only its panel."""
    picture = pixels(draw("run", ROWS))
    other = pixels(draw("run", [{**r, **({"train/loss": r["step"]} if "train/loss" in r else {})} for r in ROWS]))
    height, width, _ = picture.shape
    assert picture.shape == other.shape
    changed = (picture != other).any(2)
    assert changed[: height // 2, : width // 3].sum() > 500
    assert not changed[height // 2 + 20 :, :].any()


@pytest.mark.parametrize("rows", [[], ROWS[:1], ROWS[-1:]])
def test_a_run_with_few_or_no_rows_can_be_drawn(rows: list[dict[str, float]]) -> None:
    assert pixels(draw("run", rows)).shape[2] == 3


@pytest.mark.parametrize("name", [r"$\frac{$", "$$", "[x]", "日本"])
def test_names_are_drawn_literally(name: str) -> None:
    """TeX in a name is no error, and is not set as a formula."""
    metric = f"eval/{name}/top1"
    other = f"eval/{name}/b/top1"
    rows = [*ROWS, {"step": 29, metric: 0.9, other: 0.5}]
    drawn = pixels(draw(name, rows))
    if name == "$$":
        assert (drawn != pixels(draw("", rows))).any()
    assert drawn.shape[2] == 3


def test_the_page_is_self_contained_and_escapes_its_content(tmp_path: Path) -> None:
    write_report(tmp_path, "a <b> run", ROWS, {"eval/zeroshot/top1": 0.9231}, "name: <script>")
    page = (tmp_path / "report.html").read_text()
    assert "92.31%" in page
    assert "<script>" not in page
    assert "a &lt;b&gt; run" in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
