"""The main job, run as in the README, reaches the numbers of docs/benchmarks/README.md."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs import run
from PIL import Image

TRAIN = (sys.executable, "-m", "clipx.train")


def final(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


def train(run_dir: Path, *overrides: str) -> dict[str, float]:
    """Trains on one thread: with two threads next to other tests a run takes many times as long."""
    run(*TRAIN, f"run_dir={run_dir}", *overrides, timeout=2400, fresh=True)
    return final(run_dir)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_default_run_reaches_the_documented_accuracy_on_held_out_combinations(tmp_path: Path) -> None:
    found = train(tmp_path / "run")
    assert found["eval/zeroshot/held_out/top1"] >= 0.90
    assert found["eval/zeroshot/held_out/chance"] == pytest.approx(1 / 24)
    assert found["eval/zeroshot/top1"] > 10 * found["eval/zeroshot/chance"]
    for direction in ("image_to_text", "text_to_image"):
        assert found[f"eval/retrieval/{direction}/recall@5"] > 0.9
    assert (tmp_path / "run" / "report.png").stat().st_size > 10_000
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.number
@pytest.mark.timeout(2400)
def test_digits_reach_the_documented_accuracy(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "data=digits")["eval/zeroshot/top1"] >= 0.97


# --------------------------------------------------------------------------------- user data, small and fast

NAMES = ("zero", "one", "two")
QUICK = (
    *("duration=8ep", "schedule.warmup=5st", "data.batch_size=64", "data.workers=0", "checkpoint=none", "logger=[]"),
    "report=false",
)
BOTH = ("evaluator=[zeroshot,retrieval]", "evaluator.zeroshot.every=end", "evaluator.retrieval.every=end")


def scans() -> Iterator[tuple[Image.Image, int]]:
    """Yields the zeros, ones and twos among scikit-learn's digits: some 540 real images."""
    from sklearn.datasets import load_digits

    for pixels, label in zip(*load_digits(return_X_y=True), strict=True):
        if label < len(NAMES):
            yield Image.fromarray((pixels.reshape(8, 8) * 15).astype("uint8")).resize((40, 32)), int(label)


def encoded(image: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    image.convert("RGB").save(out, kind)
    return out.getvalue()


def class_names(folder: Path) -> str:
    (folder / "names.txt").write_text("\n".join(NAMES))
    return f"evaluator.zeroshot.classnames={folder}/names.txt"


def test_a_table_of_jpeg_png_and_webp_files_trains_and_is_evaluated(tmp_path: Path) -> None:
    lines = ["filepath,caption,class"]
    for i, (image, label) in enumerate(scans()):
        kind = ("jpeg", "png", "webp")[i % 3]
        (tmp_path / f"{i}.{kind}").write_bytes(encoded(image, kind))
        lines.append(f"{i}.{kind},a photo of a {NAMES[label]}.,{NAMES[label]}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    data = ("data=csv", f"data.path={tmp_path}/table.csv", "data.label_column=class", class_names(tmp_path))
    run(*TRAIN, *data, *BOTH, *QUICK, f"run_dir={tmp_path}/run")
    found = final(tmp_path / "run")
    assert found["eval/zeroshot/top1"] > 0.8
    assert found["eval/retrieval/image_to_text/recall@1"] > 0.8, "equal captions must count as one"
    assert found["train/bad_samples"] == 0
