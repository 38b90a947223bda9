"""Draws layers.svg, the layers of the packages, from the contract of import-linter, and flow.svg, the flow of the data.

Run it with `python docs/architecture/picture.py`. All text is dark on light boxes, for light and for dark pages.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, GAP, MARGIN = 760, 40, 6, 6  # of the picture; of a layer; between boxes; left and right
STYLE = "text{font:11px sans-serif;fill:#1a1a1a;text-anchor:middle}.name{font:bold 14px sans-serif}"

PURPOSES = {
    "clipx_launch": "launchers for SLURM and this machine, clipx-sweep",
    "bench": "benchmarks; imported by nothing",
    "extra": "features in the box: CoCa, NaFlex, curation, plans, …; each as a package of another author",
    "train": "a run",
    "evaluate": "checkpoints and other weights",
    "export": "weights for other libraries",
    "command_spec": "base classes of the options of the commands",
    "trainer": "RunSpec, the loop, one optimizer step, gradient cache, stages, metrics",
    "teacher": "a second model for distillation, live or stored",
    "weights": "import and export: clipx, open_clip, OpenAI, timm",
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
    "compat": "private names of other packages",
    "errors": "exceptions, exit codes",
    "escape": "names as text",
    "output": "standard streams",
    "abort": "end of a process",
    "commands": "commands by name",
    "processes": "child processes",
    "version": "number",
}
COLORS = {  # by the first package of a layer; a layer without one has the colour of the layer above it
    "clipx_launch": "#d9d2e9",
    "extra": "#cfe2f3",
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
    return svg("Packages of clipx: an import points down", WIDTH, height, parts, STYLE)


def svg(title: str, width: int, height: int, parts: Sequence[str], style: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{title}</title><style>{style}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


# ---------------------------------------------------------------------------------------------------- flow of the data

FLOW_WIDTH, STEP = 900, 80  # of the picture; from a row of boxes to the next
WHOLE, LEFT, RIGHT, INSIDE, SIDE = (16, 544), (16, 264), (296, 264), (36, 504), (636, 248)  # x and width of a column
DATA, COMPUTE, SAVED, READ = COLORS["evaluator"], COLORS["trainer"], COLORS["extra"], COLORS["clipx_launch"]
GRADCACHE = "clipx/trainer/gradcache.py"


@dataclass(frozen=True)
class Part:
    """A box of the flow: what holds or handles the data."""

    name: str
    purpose: str  # a newline begins a further line
    file: str  # or folder
    column: tuple[int, int]
    row: float
    color: str

    @property
    def top(self) -> float:
        return 16 + self.row * STEP

    @property
    def height(self) -> int:
        return 40 + 14 * (1 + self.purpose.count("\n"))

    @property
    def middle(self) -> float:
        return self.column[0] + self.column[1] / 2

    def draw(self) -> str:
        x, width = self.column
        lines = [("name", self.name), *(("", line) for line in self.purpose.split("\n")), ("file", self.file)]
        texts = [words(line, self.middle, self.top + 18 + 15 * i, kind) for i, (kind, line) in enumerate(lines)]
        return rectangle(x, self.top, width, self.height, self.color) + "".join(texts)


FLOW = {
    "source": Part("Source", "image, captions and label by index", "clipx/data/source.py", LEFT, 0, DATA),
    "order": Part("Order", "index = order(seed, epoch, position)", "clipx/data/order.py", RIGHT, 0, DATA),
    "loader": Part(
        "Loader processes", "read, decode, crop and tokenize into shared memory", "clipx/data/loader.py", WHOLE, 1, DATA
    ),
    "batch": Part("Batch", "pixels, tokens, index, targets of a rank's samples", "clipx/data/batch.py", WHOLE, 2, DATA),
    "prefetch": Part(
        "DevicePrefetcher",
        "takes the next batch to the device during a step",
        "clipx/data/loader.py",
        WHOLE,
        3,
        DATA,
    ),
    "forward": Part("Forward in micro-batches", "both towers, under autocast", GRADCACHE, INSIDE, 4.4, COMPUTE),
    "objective": Part(
        "Objective",
        "gathers the embeddings of all ranks; loss and gradient of the embeddings",
        "clipx/objective/base.py",
        INSIDE,
        5.4,
        COMPUTE,
    ),
    "backward": Part(
        "Backward in micro-batches",
        "gradients of the weights, averaged over the ranks",
        GRADCACHE,
        INSIDE,
        6.4,
        COMPUTE,
    ),
    "decide": Part(
        "Unscale, clip, decide",
        "global norm; a step that is not finite changes nothing",
        "clipx/trainer/learner.py",
        INSIDE,
        7.4,
        COMPUTE,
    ),
    "update": Part(
        "Optimizer",
        "updates the weights, and the parameters of the objective",
        "clipx/optimizer/",
        INSIDE,
        8.4,
        COMPUTE,
    ),
    "weights": Part("Weights", "of both towers", "clipx/model/clip.py", LEFT, 9.6, SAVED),
    "average": Part("WeightAverage", "exponential, with ema_decay", "clipx/trainer/ema.py", RIGHT, 9.6, SAVED),
    "meter": Part("Meter", "sums on the device", "clipx/trainer/metrics.py", SIDE, 4.6, READ),
    "loggers": Part("Loggers", "metrics.jsonl, TensorBoard, …", "clipx/logger/sinks.py", SIDE, 5.6, READ),
    "checkpoint": Part(
        "Checkpoint",
        "model, objective, optimizer, scaler,\ndata position, counters, rng, config",
        "clipx/checkpoint/manager.py",
        SIDE,
        7,
        SAVED,
    ),
    "storage": Part("Storage", "this machine, and any URL", "clipx/storage/", SIDE, 8.2, SAVED),
    "evaluators": Part("Evaluators", "zero-shot, retrieval, probe", "clipx/evaluator/base.py", SIDE, 9.6, READ),
}
DOWN = (
    ("source", "loader", "samples"),
    ("order", "loader", "indices"),
    ("loader", "batch", "parts of at most 512 samples"),
    ("batch", "prefetch", ""),
    ("prefetch", "forward", ""),
    ("forward", "objective", "embeddings of the whole batch"),
    ("objective", "backward", "gradient of the embeddings"),
    ("backward", "decide", "gradient of the weights"),
    ("decide", "update", ""),
    ("update", "weights", ""),
    ("update", "average", ""),
    ("meter", "loggers", "one read per log"),
    ("checkpoint", "storage", ""),
)
ASIDE = (("meter", "loss, metrics"), ("checkpoint", "state"), ("evaluators", "read"))
"""Arrows from the left columns to the side column, each at the height of its end."""


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{color}" stroke="#808080"/>'


def arrow(path: str) -> str:
    return f'<path d="{path}" stroke="#404040" marker-end="url(#end)"/>'


def down(start: Part, end: Part, label: str) -> str:
    """Returns an arrow in the middle of the narrower part, with its label beside it."""
    x, y = min(start, end, key=lambda part: part.column[1]).middle, start.top + start.height
    return arrow(f"M{x:g} {y:g}V{end.top - 2:g}") + words(label, x + 8, (y + end.top) / 2 + 4, "begin")


def aside(end: Part, label: str) -> str:
    """Returns an arrow to a part of the side column, with its label above it."""
    x, y = sum(WHOLE), end.top + end.height / 2
    return arrow(f"M{x} {y:g}H{SIDE[0] - 2}") + words(label, (x + SIDE[0]) / 2, y - 6, "")


def words(text: str, x: float, y: float, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>' if text else ""


def flow() -> str:
    """Returns the picture of the flow as SVG."""
    height = int(FLOW["weights"].top) + 70
    (x, width), top, last = WHOLE, FLOW["forward"].top - 42, FLOW["update"]
    marker = '<marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    parts = [
        f'<defs>{marker}<path d="M0 0L8 4L0 8z" fill="#404040"/></marker></defs>',
        rectangle(1, 1, FLOW_WIDTH - 2, height - 2, "#ffffff"),
        rectangle(x, top, width, last.top + last.height + 14 - top, COLORS["cli"]),
        words("Trainer.step", x + 20, top + 26, "name begin"),
        words("clipx/trainer/trainer.py", x + width - 20, top + 26, "file end"),
        *(part.draw() for part in FLOW.values()),
        *(down(FLOW[start], FLOW[end], label) for start, end, label in DOWN),
        *(aside(FLOW[end], label) for end, label in ASIDE),
    ]
    more = ".file{font:11px monospace;fill:#404040}.begin{text-anchor:start}.end{text-anchor:end}"
    title = "Flow of the data of a run: loader, batch, step, objective, optimizer, checkpoint"
    return svg(title, FLOW_WIDTH, height, parts, STYLE + more)


if __name__ == "__main__":
    (HERE / "layers.svg").write_text(picture(), encoding="utf-8")
    (HERE / "flow.svg").write_text(flow(), encoding="utf-8")
