"""Search of the values that conf/experiment/fastclip_small gives each contender, on other scenes and another seed.

For each contender and batch size, one value after another: the temperature, the learning rate, then the smallest γ or
the bias, each at the best values so far. All runs have exchanged captions, which the hypotheses are about; the runs
without exchanged captions use the same values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipx.bench.fastclip_parts.study import CONTENDER, REFERENCED, Study, StudyData
from clipx.bench.findings import Table
from clipx.bench.spec import BenchError
from clipx.logger import read_rows

SEED = 50
RECALL = ("eval/retrieval/image_to_text/recall@1", "eval/retrieval/text_to_image/recall@1")

# The second one is that of the search of the temperature.
_LEARNING_RATES = {
    16: ("3e-4", "6e-4", "1.2e-3", "2.4e-3", "1.5e-4"),
    64: ("6e-4", "1.2e-3", "2.4e-3", "4.8e-3", "3e-4"),
    256: ("1.2e-3", "2.4e-3", "4.8e-3", "9.6e-3", "6e-4"),
}
_TEMPERATURES = ("0.05", "0.1", "0.2", "0.4")
_GAMMAS = ("0.2", "0.5", "0.8")
_BIASES = ("-10", "-5", "-2.5")
_INITIAL, _CONSTANT = "objective.init_temperature", "objective.temperature"
_GAMMA, _BIAS = "objective.gamma.minimum", "objective.init_bias"

CONTENDERS: Mapping[str, tuple[str, str | None]] = {
    "infonce": (_INITIAL, None),
    "infonce_constant": (_INITIAL, None),
    "dcl": (_INITIAL, None),
    "siglip": (_INITIAL, _BIAS),
    "sogclr": (_CONSTANT, _GAMMA),
    "isogclr": (_INITIAL, _GAMMA),
    "fastclip_v0": (_INITIAL, _GAMMA),
    "fastclip_v1": (_CONSTANT, _GAMMA),
    "fastclip_v2": (_INITIAL, _GAMMA),
    "fastclip_v3": (_INITIAL, _GAMMA),
}
"""Keys of the temperature, and of a third value if there is one."""

OPTIMIZERS: Mapping[str, Sequence[str]] = {
    "adamw_tiny": ("6e-4", "1.2e-3", "2.4e-3", "4.8e-3"),
    "lamb": ("2e-3", "4e-3", "8e-3", "1.6e-2"),
    "lion": ("5e-5", "1e-4", "2e-4", "4e-4", "8e-4"),
    "sgd": ("0.03", "0.1", "0.3", "1"),
    "muon": ("3e-4", "6e-4", "1.2e-3", "2.4e-3", "4.8e-3"),
}


SUCCESSORS: Mapping[str, tuple[str, str | None]] = {"drrho_clip": (_INITIAL, _GAMMA), "neuclip": (_INITIAL, None)}
"""The same for the successors of FastCLIP."""


def tune_contenders(study: Study, data: StudyData) -> Table:
    """Tunes all contenders and optimizers. Returns the values, and writes them to tuned.json."""
    with ThreadPoolExecutor(study.processes) as pool:
        rows = _contenders(study, data, CONTENDERS, pool)
        rows += pool.map(lambda name: _optimizer(study, data, name), OPTIMIZERS)
    return _written(study, "tuned", rows)


def tune_successors(study: Study, data: StudyData) -> Table:
    """Tunes DRRho-CLIP and NeuCLIP. Returns the values, and writes them to tuned_successors.json."""
    data = study.train_references(data, [(0.2, SEED)])
    with ThreadPoolExecutor(study.processes) as pool:
        return _written(study, "tuned_successors", _contenders(study, data, SUCCESSORS, pool))


def _written(study: Study, name: str, rows: list[Sequence[str]]) -> Table:
    columns = ("contender", "batch", "temperature", "learning rate", "γ or bias", "recall@1, %")
    (study.folder / f"{name}.json").write_text(
        json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1) + "\n", encoding="utf-8"
    )
    return Table("tuned on exchanged captions of other scenes", columns, rows)


def _contenders(
    study: Study, data: StudyData, keys: Mapping[str, tuple[str, str | None]], pool: ThreadPoolExecutor
) -> list[Sequence[str]]:
    cells = [(batch, name) for batch in _LEARNING_RATES for name in keys]
    return list(pool.map(lambda cell: _contender(study, data, cell[0], cell[1], *keys[cell[1]]), cells))


def _contender(
    study: Study, data: StudyData, batch: int, name: str, temperature: str, third: str | None
) -> Sequence[str]:
    rates = _LEARNING_RATES[batch]
    fixed = {CONTENDER: name, "data.batch_size": str(batch), "optimizer.lr": rates[1]}
    stages: list[tuple[str, Sequence[str]]] = [(temperature, _TEMPERATURES), ("optimizer.lr", rates)]
    if third is not None:
        thirds = _GAMMAS if third == _GAMMA else _BIASES
        fixed[third] = thirds[1]
        stages.append((third, thirds))
    recall = math.nan
    for key, values in stages:
        fixed[key], recall = _best(study, data, f"{name}-{batch}-{key.rpartition('.')[2]}", fixed, key, values)
    study.log(f"tuned {name} at batch {batch}: {recall:.1%}")
    last = fixed[third] if third else ""
    return name, str(batch), fixed[temperature], fixed["optimizer.lr"], last, f"{100 * recall:.1f}"


def _optimizer(study: Study, data: StudyData, name: str) -> Sequence[str]:
    fixed = {CONTENDER: "fastclip_v3", "data.batch_size": "64", "optimizer": name}
    rate, recall = _best(study, data, f"{name}-64-lr", fixed, "optimizer.lr", OPTIMIZERS[name])
    return f"fastclip_v3, {name}", "64", "", rate, "", f"{100 * recall:.1f}"


def _best(
    study: Study, data: StudyData, name: str, fixed: Mapping[str, str], key: str, values: Sequence[str]
) -> tuple[str, float]:
    """Runs a sweep over the values of a key. Returns (value, recall) of the best run."""
    words = [f"{other}={value}" for other, value in fixed.items() if other != key]
    words += data.references if fixed[CONTENDER] == REFERENCED else ()
    swept = (f"{key}={','.join(values)}", f"seed={SEED}", "data.mismatched=0.2", "evaluator.retrieval.every=end")
    folder = study.sweep(f"tuning-sweeps/{name}", "fastclip_small", data, *words, *swept, processes=1)
    recalls = [recall_of(folder / str(number)) for number in range(len(values))]
    best = max(range(len(values)), key=recalls.__getitem__)
    return values[best], recalls[best]


def recall_of(run: Path) -> float:
    """Returns the last recall@1 of a run, the mean of both directions. Raises BenchError if there is none."""
    for row in reversed(read_rows(run / "metrics.jsonl")):
        if all(name in row for name in RECALL):
            return sum(row[name] for name in RECALL) / len(RECALL)
    raise BenchError(f"{run} has no recall@1: see its log")
