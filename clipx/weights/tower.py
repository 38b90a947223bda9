"""Loading of the weights of one tower: `model.image.weights` and `model.text.weights`.

    normalization_of(spec) -> mean and std for the model to build
    load_towers(model, spec) -> lines for the log

A tower is loaded strictly below its projection. What the weights do not have above, or have for another embedding,
stays random, and a line of the log says so.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from clipx.checkpoint.state import load_module
from clipx.errors import CheckpointError, ConfigError, require
from clipx.model.clip import CLIP
from clipx.model.lora import initial_adapters
from clipx.model.spec import ModelSpec
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower, reason
from clipx.storage.safe_json import shown
from clipx.weights.clip_config import TRAINING, pool_of
from clipx.weights.download import errors_of
from clipx.weights.key_mapping import Rule, tied
from clipx.weights.load import LoadedWeights, compared, load_weights
from clipx.weights.positions import fit_positions
from clipx.weights.timm_filter import TimmFilter
from clipx.weights.tower_source import INPUT, TimmWeights, head_source, image_source, input_of

ADAPTED = TRAINING | {"img_size", "num_classes", "in_chans"}
"""Arguments of timm.create_model that weights do not depend on, or are adapted to."""

# Names of a TokenHead and of the vision head of dino.txt.
_HEAD_NAMES = (
    Rule("norm.*", "ln_final.*"),
    *(
        Rule(f"blocks.#.mlp.{ours}.*", f"block_list.#.mlp.{theirs}.*")
        for ours, theirs in (("fc1_g", "w1"), ("fc1_x", "w2"), ("fc2", "w3"))
    ),
    Rule("blocks.#.**", "block_list.#.**"),
)


def normalization_of(spec: ImageTowerSpec) -> dict[str, list[float]]:
    """Returns mean and std of the pixels by these keys: those given, else of `weights`, else CLIP's.

    Raises ClipxError for a location without weights, or with weights that cannot be read safely.
    """
    missing = [key for key in spec.normalization if getattr(spec, key) is None]
    if spec.weights is None or not missing:
        return spec.normalization
    known = input_of(image_source(spec.weights, spec.architecture))
    return spec.normalization | {key: list(map(float, known[key])) for key in missing if key in known}


def load_towers(model: CLIP, spec: ModelSpec) -> list[str]:
    """Loads the weights that `spec` names for single towers, if any. Returns lines for the log.

    Raises ClipxError for weights of another architecture, of other images, and for missing or unexpected tensors.
    """
    lines = []
    for tower, location in spec.tower_weights.items():
        load = _load_image if tower == "image" else _load_text
        lines += [f"{tower} tower: {location}", *load(model, spec, location)]
    return lines


def _load_image(model: CLIP, spec: ModelSpec, location: str) -> list[str]:
    image = model.image
    assert isinstance(image, ImageTower)  # checked by the spec
    source = image_source(location, spec.image.architecture)
    pixels = _check_input(spec.image, input_of(source), location)
    if isinstance(source, LoadedWeights):
        tensors, notes = _of_clip(spec, "image", source)
    else:
        _check_architecture(spec.image, source)
        convert, own = TimmFilter.record(spec.image), image.untransferred()
        _check_options(spec.image, source, convert.model)
        found, notes = _converted(spec.image, source, convert)
        tensors = {name: tensor for name, tensor in found.items() if name not in own}
    if spec.image.head_weights is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
        tensors |= _head_tensors(image, spec.image, spec.image.head_weights)
        notes.append(f"head_blocks: {spec.image.head_weights}")
    return _fill(model, spec, "image", tensors, [pixels, *notes])


def _load_text(model: CLIP, spec: ModelSpec, location: str) -> list[str]:
    own = spec.text.own_weights
    found = None if own is None else pkgutil.resolve_name(own)(spec.text, location)
    if found is None:
        with errors_of("model.text.weights"):
            source = load_weights(location)
        found = _of_clip(spec, "text", source)
    return _fill(model, spec, "text", *found)


# ---------------------------------------------------------------------------------------------------- kinds of source


def _of_clip(spec: ModelSpec, tower: str, source: LoadedWeights) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of one tower of a CLIP model by their names in the tower, and lines for the log."""
    kind = None if source.spec is None else source.spec.image.kind
    if tower == "image" and kind is not None and not kind.has_trunk:
        raise ConfigError(
            f"model.image.weights={source.location} has {kind.option}, which is no image tower: give another"
        )
    tensors, notes = compared(spec, source, tower == "text", tower)
    prefix = f"{tower}."
    return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}, notes


def _head_tensors(image: ImageTower, spec: ImageTowerSpec, location: str) -> dict[str, Tensor]:
    """Returns the tensors of a vision head of dino.txt by their names in the image tower.

    Raises CheckpointError for a file of another head, by the names in the file.
    """
    assert image.head is not None  # checked by the spec
    tensors, state = head_source(location), image.head.state_dict()
    names = {tie.theirs: tie.ours for tie in tied(_HEAD_NAMES, state)}
    misfits = [f"{name} is missing" for name in sorted(names.keys() - tensors.keys())]
    misfits += [f"{shown(name)} is unexpected" for name in sorted(tensors.keys() - names.keys())]
    for name in sorted(names.keys() & tensors.keys()):
        found, own = list(tensors[name].shape), list(state[names[name]].shape)
        misfits += [f"{name} has shape {found}, expected {own}"] if found != own else []
    if misfits:
        raise CheckpointError(
            f"model.image.head_weights={location} does not fit {spec.head_blocks} blocks above {spec.timm}: "
            f"{'; '.join(misfits[:3])}: give a vision head of dino.txt for this trunk, without linear_projection, and "
            "the number of its blocks as model.image.head_blocks"
        )
    return {f"head.{ours}": tensors[theirs] for theirs, ours in names.items()}


def _converted(spec: ImageTowerSpec, source: TimmWeights, convert: TimmFilter) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a timm model by their names in the image tower, without the classifier, and lines for the
    log. Raises CheckpointError for a file that timm cannot convert."""
    try:
        found = convert(source.tensors)
    except Exception as error:  # of any type, for the layout of another architecture
        raise CheckpointError(
            f"{source.location} does not fit timm's {spec.timm} ({reason(error)[:200]}): choose the architecture of "
            "these weights"
        ) from None
    expected = convert.model.state_dict()
    dropped = sorted(name for name in found if name not in expected and convert.is_classifier(name))
    notes = [f"dropped the classifier: {', '.join(dropped)}"] if dropped else []
    for name in sorted(found.keys() & source.tensors.keys()):
        before, after = source.tensors[name].shape, found[name].shape
        if before != after and not name.endswith("qkv.weight"):
            notes.append(f"{name} was interpolated from {list(before)} to {list(after)}")
    return {f"trunk.{name}": tensor for name, tensor in found.items() if name not in dropped}, notes


# -------------------------------------------------------------------------------------------------------------- checks


def _check_input(spec: ImageTowerSpec, known: Mapping[str, Any], location: str) -> str:
    """Compares the preparation of images with that for the weights. Returns a line for the log.

    `known`: values of the weights. Raises ConfigError if one differs.
    """
    differs: list[str] = []
    types: list[str] = []
    for key in INPUT:
        if key not in known or (key == "interpolation" and known[key] not in ("bicubic", "bilinear")):
            continue
        ours, theirs = spec.normalization.get(key, getattr(spec, key)), known[key]
        if isinstance(theirs, list | tuple):
            same = len(ours) == len(theirs) and all(abs(a - b) < 1e-4 for a, b in zip(ours, theirs, strict=True))
        else:
            same = ours == theirs
        if not same:
            ours, theirs = _shown(ours), _shown(theirs)
            differs.append(f"{key}={theirs}, not model.image.{key}={ours}")
            types.append(f"model.image.{key}={theirs}")
    require(
        not differs,
        f"model.image.weights={location} were trained on images with {'; '.join(differs)}: give {' '.join(types)}",
    )
    pixels = " ".join(f"{key}={_shown(value)}" for key, value in spec.normalization.items())
    origin = (
        "as in the training of these weights" if known else "not compared with the weights, which have no configuration"
    )
    return f"pixels are normalized by {pixels}, {origin}"


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value).lower()


def _check_architecture(spec: ImageTowerSpec, source: TimmWeights) -> None:
    theirs = (source.architecture or spec.architecture).partition(".")[0]
    require(
        theirs == spec.architecture.partition(".")[0],
        f"model.image.weights={source.location} holds weights of timm's {theirs}, and model.image.timm={spec.timm}: "
        f"give model.image.timm={theirs}",
    )


def _check_options(spec: ImageTowerSpec, source: TimmWeights, trunk: Any) -> None:
    """Raises ConfigError if the weights are of a model with other arguments of timm.create_model."""
    for key, value in source.options.items():
        usual = pool_of(trunk, spec.architecture) if key == "global_pool" else None
        require(
            key in ADAPTED or spec.options.get(key, usual) == value,
            f"model.image.weights={source.location} holds weights of a model with {key}={value}: give "
            f"model.image.options.{key}={value}",
        )


# ------------------------------------------------------------------------------------------------------------- loading


def _fill(model: CLIP, spec: ModelSpec, tower: str, tensors: Mapping[str, Tensor], notes: list[str]) -> list[str]:
    """Loads a tower. `tensors`: by their names in it. Returns lines for the log.

    A module above the tower is loaded if all its names and shapes fit. Else it stays random.
    """
    module: nn.Module = model.get_submodule(tower)
    location, state = spec.tower_weights[tower], module.state_dict()
    above, theirs = (_above(module, names) for names in (state, tensors))
    kept, unused = set[str](), set[str]()
    for part in above.keys() | theirs.keys():
        names, found = above.get(part, set()), theirs.get(part, set())
        if names != found or any(tensors[name].shape != state[name].shape for name in names):
            kept, unused = kept | names, unused | found
    own: Mapping[str, Tensor] = {name: tensor for name, tensor in tensors.items() if name not in unused}
    if tower == "image":
        fitted, changed = fit_positions(model, {f"image.{name}": tensor for name, tensor in own.items()})
        own, notes = {name.removeprefix("image."): tensor for name, tensor in fitted.items()}, [*notes, *changed]
    _check_trained(module, spec, tower, kept)
    norms, adapters = initial_adapters(module, own)
    load_module(module, {**own, **norms} if norms else own, f"{tower} tower at {location}", kept | adapters)
    return [
        *notes,
        *_line("dropped, of another shape or form", tower, unused),
        *_line("initialized randomly", tower, kept),
    ]


def _above(module: nn.Module, names: Iterable[str]) -> dict[str, set[str]]:
    """Returns the names of the tensors that depend on both towers or have no counterpart in other models, by part."""
    of_image = module.untransferred() if isinstance(module, ImageTower) else None
    found: dict[str, set[str]] = {}
    for name in names:
        part = name.partition(".")[0]
        if part in ("projection", "pool") if of_image is None else part != "trunk" or name in of_image:
            found.setdefault(part, set()).add(name)
    return found


def _check_trained(module: nn.Module, spec: ModelSpec, tower: str, random: set[str]) -> None:
    """Raises ConfigError if randomly initialized parameters are frozen."""
    frozen = sorted(name for name, p in module.named_parameters() if name in random and not p.requires_grad)
    lock = (spec.image if tower == "image" else spec.text).lock
    require(
        not frozen,
        f"model.{tower}.lock={lock} freezes {', '.join(frozen[:3])}, which model.{tower}.weights="
        f"{spec.tower_weights[tower]} does not have: give model.{tower}.lock=0, which trains it, or model.{tower}."
        "projection=none",
    )


def _line(what: str, tower: str, names: set[str]) -> list[str]:
    """Returns a line for the log that names the modules of these tensors, or no line."""
    parts = {name.partition(".")[0] if not name.startswith("trunk.") else name.rpartition(".")[0] for name in names}
    return [f"{what}: {', '.join(f'{tower}.{part}' for part in sorted(parts))}"] if parts else []
