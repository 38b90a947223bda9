"""Options of the group model that tensors without a configuration fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import Tensor

from clipx.config.compose import checked, compose_config, config_folders
from clipx.config.messages import COMPOSITION_ERRORS
from clipx.config.registry import option_files
from clipx.errors import ClipxError
from clipx.model.spec import ModelSpec
from clipx.weights.open_clip import from_open_clip

_PROJECTIONS = ("text_projection", "text.text_projection", "text_projection.weight", "text.text_projection.weight")


def fitting_options(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the options of the running command's group model with the names and shapes of `tensors`.

    Builds only models with their dimension of embeddings, in a few seconds. Models with equal names and shapes, such as
    those with another activation, all fit. `tensors`: by open_clip's names.
    """
    if not HydraConfig.initialized():
        return []
    command, folders = str(HydraConfig.get().job.config_name), config_folders()
    sizes = {size for name in _PROJECTIONS if name in tensors for size in tensors[name].shape}

    def fits(name: str) -> bool:
        try:
            return _fits(checked(compose_config(command, [f"model={name}"], folders).model), tensors)
        except (ClipxError, *COMPOSITION_ERRORS):
            return False

    files = option_files("model", folders).items()
    near = [name for name, path in files if OmegaConf.select(OmegaConf.load(path), "embed_dim") in (None, *sizes)]
    return [name for name in near if sizes and fits(name)]


def _fits(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> bool:
    found = from_open_clip(spec, tensors)
    wanted = spec.build(torch.device("meta"), torch.float32).state_dict()
    return all(found[name].shape == tensor.shape for name, tensor in wanted.items())
