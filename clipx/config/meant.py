"""Keys that are meant by keys that do not exist."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clipx.config.entries import SET_BY_CLIPX, Entry, entries, unselected_entries
from clipx.config.other_trainers import other_trainers
from clipx.config.suggestions import letters_of

# Names in the trainers of transformers, Lightning and timm, and what to write here.
ELSEWHERE = {
    "learning_rate": "optimizer.lr=…",
    "num_workers": "data.workers=…",
    "bs": "data.batch_size=…",
    "dataset": "data=…",
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs"), "duration=…ep"),
    **dict.fromkeys(("steps", "max_steps"), "duration=…st"),
    **dict.fromkeys(("warmup_steps", "warmup_iters"), "schedule.warmup=…st"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps", "accumulate_grad_batches"), "data.micro_batches=…"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip_grad"), "optimizer.clip_norm=…"),
    **dict.fromkeys(("output", "output_dir", "save_dir"), "run_dir=…"),
    **dict.fromkeys(("fp16", "bf16"), "precision=amp_bf16"),
}


def settable_keys(cfg: DictConfig) -> list[str]:
    """Returns the keys of a command that a user sets: those without a type are there for Hydra alone."""
    hints = typing.get_type_hints(OmegaConf.get_type(cfg))
    return [name for name, hint in hints.items() if hint is not Any and name not in SET_BY_CLIPX]


def meant(key: str, cfg: DictConfig) -> str:
    """Returns what is meant by a key that does not exist, `optimizer.lr` by `lr`. Empty: that is not known."""
    if found := meant_keys(key, cfg):
        return " or ".join(_places(found))
    name = key.rpartition(".")[2].replace("-", "_")
    words = ELSEWHERE.get(name, "").split()
    for trainer in other_trainers():
        words = trainer.overrides(name) or words
    return " ".join(words) if words and re.split(r"[.=@]", words[0].lstrip("+"))[0] in settable_keys(cfg) else ""


def meant_keys(key: str, cfg: DictConfig) -> list[Entry]:
    """Returns the keys that end in `key`, `optimizer.lr` for `lr`: of the selected options, else of all others.

    If there are none, those whose letters end so, else those that resemble it. Of several only those with the fewest
    parts. None in the items of lists.
    """
    known = [entry for entry in entries(cfg) if ".N." not in entry.key]
    others = list(unselected_entries(settable_keys(cfg)))
    name, letters = key.rpartition(".")[2], letters_of(key)
    close = difflib.get_close_matches(name, {entry.key.rpartition(".")[2] for entry in known}, n=1, cutoff=0.75)
    tests: list[Callable[[str], bool]] = [
        lambda other: other.endswith(f".{key}"),
        lambda other: len(letters) > 4 and letters_of(other).endswith(letters),  # shorter ones end many others
        lambda other: other.endswith(f".{name}"),
        lambda other: bool(close) and other.endswith(f".{close[0]}"),
    ]
    for test in tests:
        for searched in (known, others):
            if found := [entry for entry in searched if test(entry.key)]:
                fewest = min(entry.key.count(".") for entry in found)
                return [entry for entry in found if entry.key.count(".") == fewest]
    return []


def _places(found: Sequence[Entry]) -> Iterator[str]:
    """Yields each key once, with the options that have it unless all of its group do."""
    for key in dict.fromkeys(entry.key for entry in found):
        group = key.partition(".")[0]
        having = {entry.option for entry in found if entry.key == key}
        lacking = {entry.option for entry in unselected_entries([group])} - having
        names = sorted(option.partition("=")[2] for option in having if option)
        yield f"{key} (of {group}={', '.join(names)})" if names and lacking else key
