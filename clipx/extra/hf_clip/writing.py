"""Export to transformers: a folder for CLIPModel, CLIPProcessor and AutoTokenizer, written without transformers.

(According to the code of transformers 5.23.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from clipx.data.transform import PILLOW
from clipx.errors import CheckpointError
from clipx.extra.hf_clip.reading import RULES
from clipx.extra.hf_clip.tokenizer import END, START, exported_tokenizer
from clipx.model.spec import ClipSpec, ModelSpec
from clipx.model.tokenizer import Tokenizer
from clipx.weights.open_clip import config_of
from clipx.weights.open_clip_checkpoint import state_dict

if TYPE_CHECKING:
    from clipx.weights.export import Exported


def write(folder: Path, exported: Exported) -> list[str]:
    """Writes the folder. Returns notes on what CLIPModel does not support.

    Raises CheckpointError for a model that CLIPModel does not support.
    """
    weights = exported.weights
    assert weights.spec is not None
    config = _config(weights.spec, weights.log_scale)
    tensors = dict(_renamed(state_dict(weights)))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write(folder / "config.json", config)
    _write(folder / "preprocessor_config.json", _preprocessor(weights.spec))
    _write_tokenizer(folder, weights.spec.text.context_length)
    return [] if weights.bias is None else [f"dropped the bias {weights.bias:.4g}: CLIPModel has none"]


def _renamed(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name == "logit_bias":
            continue
        tie = next(filter(None, (rule.tie(name) for rule in RULES)))
        chunks = tensor.chunk(len(tie.parts)) if len(tie.parts) > 1 else [tensor]
        yield from zip(tie.parts, map(tie.to_theirs, chunks), strict=True)


# ----------------------------------------------------------------------------------------------- configuration


def _config(spec: ModelSpec, log_scale: float | None) -> dict[str, Any]:
    """Returns the values of CLIPConfig. Raises CheckpointError for a model that CLIPModel does not support."""
    known = config_of(spec)
    if type(spec) is not ClipSpec:
        raise _refused(f"model {spec.name} is of kind {spec.kind}")
    vision, text = known["vision_cfg"], known["text_cfg"]
    if "timm_model_name" in vision or not isinstance(vision["layers"], int):
        raise _refused(f"the image tower of model {spec.name} is timm's {spec.image.timm}")
    _check_keys(spec, "vision_cfg", vision, ("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"))
    _check_keys(spec, "text_cfg", text, ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"))
    shared = {
        "hidden_act": "quick_gelu" if spec.quick_gelu else "gelu",
        "layer_norm_eps": torch.nn.LayerNorm(1).eps,
        "projection_dim": spec.embed_dim,
    }
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": spec.embed_dim,
        "logit_scale_init_value": log_scale,
        "vision_config": {
            "model_type": "clip_vision_model",
            **_tower(vision, vision["width"] // vision.get("head_width", 64)),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            **shared,
        },
        "text_config": {
            "model_type": "clip_text_model",
            **_tower(text, text["heads"]),
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["context_length"],
            "bos_token_id": Tokenizer.start_id,
            "eos_token_id": Tokenizer.end_id,
            "pad_token_id": Tokenizer.end_id,
            **shared,
        },
    }


def _tower(config: dict[str, Any], heads: int) -> dict[str, int]:
    return {
        "hidden_size": config["width"],
        "intermediate_size": int(config["width"] * config.get("mlp_ratio", 4.0)),
        "num_hidden_layers": config["layers"],
        "num_attention_heads": heads,
    }


def _check_keys(spec: ModelSpec, place: str, config: dict[str, Any], known: Iterable[str]) -> None:
    """Raises CheckpointError for a key of open_clip's configuration that CLIPConfig does not have."""
    if further := sorted(config.keys() - set(known)):
        raise _refused(f"model {spec.name} needs open_clip's {place}.{further[0]}={config[further[0]]}")


def _refused(reason: str) -> CheckpointError:
    return CheckpointError(
        f"format=hf supports only ViTs in CLIP's form with CLIP's tokenizer, but {reason}: choose format=open_clip"
    )


# -------------------------------------------------------------------------------------------------- processing


def _preprocessor(spec: ModelSpec) -> dict[str, Any]:
    """Returns the configuration of a CLIPImageProcessor that processes images as clipx's evaluation does."""
    size, normalization = spec.image.size, spec.image.normalization
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": size, "width": size} if spec.image.stretch else {"shortest_edge": size},
        "resample": int(PILLOW[spec.image.interpolation]),
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": normalization["mean"],
        "image_std": normalization["std"],
    }


def _write_tokenizer(folder: Path, context_length: int) -> None:
    """Writes clipx's tokenizer. CLIPTokenizer has a cleaning of its own, so that AutoTokenizer must not choose it."""
    exported_tokenizer(context_length).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "CLIPProcessor",
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "model_max_length": context_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
