"""Loading of the weights of a model of transformers into a text tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from clipx.errors import CheckpointError
from clipx.extra.hf_text.spec import HfTextSpec
from clipx.extra.hf_text.tower import encoder_of, read_config
from clipx.storage.safe_json import shown
from clipx.weights.download import errors_of
from clipx.weights.formats import CONFIG, HF_CONFIG, INDEX, parts_of
from clipx.weights.key_mapping import check_names
from clipx.weights.tower_source import config_of, files_of, first_of

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FREE = ("dropout", "drop_rate", "_token_id", "dtype", "version", "name_or_path", "use_cache", "initializer")
"""Parts of the names of entries of config.json without effect on the encoder's function."""
_TASK = ("architectures", "id2label", "label2id", "problem_type", "transformers_weights", "tie_word_embeddings")


def load(spec: HfTextSpec, location: str) -> tuple[dict[str, Tensor], list[str]] | None:
    """Returns the tensors of a model of transformers by their names in the text tower, and lines for the log.

    transformers reads the files, pickles without executing code in them, and converts the names of older versions.
    Returns None for the weights of a CLIP model. Raises CheckpointError for weights of another model, and for missing,
    unexpected or differently shaped tensors.
    """
    with errors_of("model.text.weights"):
        folder = folder_of(location)
    if folder is None:
        return None
    config = read_config(spec)
    if location != spec.source:  # its entries that model.text.options replace are compared by shape
        theirs = HfTextSpec(source=str(folder), context_length=spec.context_length)
        _check_same(config.to_dict(), read_config(theirs).to_dict(), location)
    model, encoder, report = _loaded(config, folder, location)
    parts = {name.partition(".")[0] for name in model.state_dict()}
    bare = {name.removeprefix(f"{model.base_model_prefix}.") for name in report["unexpected_keys"]}
    further = {name for name in bare if name.partition(".")[0] in parts}
    what = f"model.text.weights={location} does not fit model.text.source={spec.source}"
    check_names(set(report["missing_keys"]), further, what, "choose the model of these weights")
    heads = sorted({name.partition(".")[0] for name in bare})
    notes = [f"dropped the heads of {location}: {', '.join(heads)}"] if heads else []
    return {f"transformer.{name}": tensor for name, tensor in encoder.state_dict().items()}, notes


def folder_of(location: str) -> Path | None:
    """Returns the local folder with the config.json and the weights, maybe in parts, of a model of transformers.

    Returns None for other locations, CLIP models among them. Raises CheckpointError for a folder without weights.
    """
    files = files_of(location)
    if files is None or config_of(files).get("model_type") in (None, "clip") or [*files(CONFIG)]:
        return None
    found = first_of(location, files, (*_WEIGHTS, *(f"{name}{INDEX}" for name in _WEIGHTS)))
    parts = parts_of(found) if found.name.endswith(INDEX) else {}
    if len([*files(*parts)]) < len(parts):
        raise CheckpointError(f"model.weights={location} lacks parts of its weights: get {', '.join(parts)} again")
    return next(files(HF_CONFIG)).parent


def _check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], location: str) -> None:
    """Raises CheckpointError if the configuration of the weights is of another model, apart from dropout and heads."""
    differs = [
        f"{key}={shown(theirs[key])}, expected {shown(ours[key])}"
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key] != theirs[key] and key not in _TASK and not any(part in key for part in _FREE)
    ]
    if differs:
        raise CheckpointError(
            f"model.text.weights={location} holds weights of another model: {'; '.join(differs[:3])}: choose "
            "the model of these weights"
        )


def _loaded(config: Any, folder: Path, location: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """Returns the model, its encoder, and transformers' report on missing and unexpected tensors.

    Draws no random numbers of this process.
    """
    options = {"config": config, "dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    models: list[tuple[Any, Mapping[str, Any]]] = []

    def create(auto: Any, **further: Any) -> Any:
        models.append(auto.from_pretrained(folder, **options, **further))
        return models[-1][0]

    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            encoder = encoder_of(config, create)
    except Exception as error:  # of many types, for files of other programs
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"model.text.weights={location} cannot be loaded by transformers {transformers.__version__} "
            f"({reason}): choose the model of these weights, or get the files again"
        ) from None
    model, report = models[-1]
    return model, encoder, report


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the report and the progress bar of transformers."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
