"""Loading of the weights of a model of transformers into a text tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from clipx.errors import CheckpointError
from clipx.model.hf_text import encoder_of, read_config
from clipx.model.hf_text_spec import HfTextSpec
from clipx.storage.safe_json import shown
from clipx.weights.key_mapping import check_names
from clipx.weights.tower_source import HfWeights

_FREE = ("dropout", "drop_rate", "_token_id", "dtype", "version", "name_or_path", "use_cache", "initializer")
"""Parts of the names of entries of config.json without effect on the encoder's function."""
_TASK = ("architectures", "id2label", "label2id", "problem_type", "transformers_weights", "tie_word_embeddings")


def load_transformer(spec: HfTextSpec, source: HfWeights) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a model of transformers by their names in the text tower, and lines for the log.

    transformers reads the files, pickles without executing code in them, and converts the names of older versions.
    Raises CheckpointError for weights of another model, and for missing, unexpected or differently shaped tensors.
    """
    config = read_config(spec)
    _check_config(spec, config, source)
    found = _loaded(config, source)
    parts = {name.partition(".")[0] for name in found.model.state_dict()}
    prefix = f"{found.model.base_model_prefix}."
    bare = {name.removeprefix(prefix) for name in found.report["unexpected_keys"]}
    further = {name for name in bare if name.partition(".")[0] in parts}
    what = f"model.text.weights={source.location} does not fit model.text.source={spec.source}"
    check_names(set(found.report["missing_keys"]), further, what, "choose the model of these weights")
    heads = sorted({name.partition(".")[0] for name in bare})
    notes = [f"dropped the heads of {source.location}: {', '.join(heads)}"] if heads else []
    return {f"transformer.{name}": tensor for name, tensor in found.encoder.state_dict().items()}, notes


def _check_config(spec: HfTextSpec, config: Any, source: HfWeights) -> None:
    """Raises CheckpointError if the configuration of the weights is of another model, apart from dropout and heads."""
    if source.location == spec.source:  # its entries that model.text.options replace are compared by shape
        return
    theirs = read_config(_at(spec, source)).to_dict()
    ours = config.to_dict()
    differs = [
        f"{key}={shown(theirs[key])}, expected {shown(ours[key])}"
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key] != theirs[key] and key not in _TASK and not any(part in key for part in _FREE)
    ]
    if differs:
        raise CheckpointError(
            f"model.text.weights={source.location} holds weights of another model: {'; '.join(differs[:3])}: choose "
            "the model of these weights"
        )


def _at(spec: HfTextSpec, source: HfWeights) -> HfTextSpec:
    return HfTextSpec(source=str(source.folder), context_length=spec.context_length)


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: Any
    encoder: Any
    report: Mapping[str, Any]  # of transformers, on missing and unexpected tensors


def _loaded(config: Any, source: HfWeights) -> _Loaded:
    """Loads the model with transformers. Draws no random numbers of this process."""
    options = {"config": config, "dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    models: list[tuple[Any, Mapping[str, Any]]] = []

    def create(auto: Any, **further: Any) -> Any:
        models.append(auto.from_pretrained(source.folder, **options, **further))
        return models[-1][0]

    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            encoder = encoder_of(config, create)
    except Exception as error:  # of many types, for files of other programs
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"model.text.weights={source.location} cannot be loaded by transformers {transformers.__version__} "
            f"({reason}): choose the model of these weights, or get the files again"
        ) from None
    model, report = models[-1]
    return _Loaded(model, encoder, report)


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
