"""Draws layers.svg, the layers of the packages, from the contract of import-linter.

Run it with `python docs/architecture/picture.py`. All text is dark on light boxes, for light and for dark pages.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, GAP, MARGIN = 760, 40, 6, 6  # of the picture; of a layer; between boxes; left and right

PURPOSES = {
    "clipx_launch": "launchers for SLURM and this machine, clipx-sweep",
    "bench": "benchmarks; imported by nothing",
    "plan": "resources",
    "trainer": "RunSpec, the loop, one optimizer step, gradient cache, stages, metrics",
    "teacher": "a second model for distillation, live or stored",
    "weights": "import and export: open_clip, OpenAI, SigLIP, Hugging Face",
    "optimizer": "AdamW, LAMB, Lion, Muon, SGD; parameter groups",
    "evaluator": "zero-shot, retrieval, probe",
    "run": "directory, lock, signals",
    "objective": "losses, temperature",
    "data": "sources, order, loader, shards",
    "checkpoint": "format, writer, upload, resume",
    "cli": "entry point of all commands: compose, check, run, report an error as one line",
    "distributed": "ranks, collectives, DDP, FSDP, heartbeat",
    "report": "console, figures, report.html",
    "model": "towers, tokenizers, packing",
    "logger": "metrics.jsonl, TensorBoard, …",
    "precision": "number formats",
    "schedule": "learning rates",
    "config": "typed options from YAML and the command line, --help, saved configurations",
    "storage": "files on this machine, at any URL, on the hub",
    "errors": "exceptions, exit codes",
    "escape": "names as text",
    "output": "standard streams",
    "abort": "end of a process",
    "version": "number",
}
COLORS = {  # by the first package of a layer; a layer without one has the colour of the layer above it
    "clipx_launch": "#d9d2e9",
    "plan": "#cfe2f3",
    "trainer": "#fce5cd",
    "evaluator": "#d9ead3",
    "cli": "#fff2cc",
    "logger": "#e6e6e6",
}


def layers() -> Iterator[list[str]]:
    """Yields the names of the packages of each layer, highest first."""
    text = (HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    yield ["clipx_launch"]
    for layer in contracts[0]["layers"]:
        names = [name.strip() for name in layer.split("|")]
        yield [name for name in names if not name.startswith("__")]


def box(name: str, purpose: str, x: float, y: float, width: float, color: str) -> str:
    """Returns a box with a name and its purpose: on one line, or on two if there are several boxes in the layer."""
    name_y, purpose_y = (y + 17, y + 32) if purpose else (y + 25, y)
    middle = x + width / 2
    text = f'<text x="{middle:g}" y="{name_y:g}" class="name">{escape(name)}</text>'
    if purpose:
        text += f'<text x="{middle:g}" y="{purpose_y:g}">{escape(purpose)}</text>'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="4" fill="{color}" stroke="#808080"/>{text}'
    )


def picture() -> str:
    """Returns the picture as SVG."""
    rows = [names for names in layers() if names]
    color, parts = "", []
    for number, names in enumerate(rows):
        color = COLORS.get(names[0], color)
        width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            purpose = "" if len(names) > 4 else PURPOSES[name]
            x, y = MARGIN + column * (width + GAP), MARGIN + number * (HEIGHT + GAP)
            parts.append(box(name, purpose, round(x, 1), y, round(width, 1), color))
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP
    style = "text{font:11px sans-serif;fill:#1a1a1a;text-anchor:middle}.name{font:bold 14px sans-serif}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>Packages of clipx: an import points down</title><style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (HERE / "layers.svg").write_text(picture(), encoding="utf-8")
