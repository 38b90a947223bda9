"""Weights of one tower: of timm, transformers, CLIP models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from helpers.dino_txt import head_shapes, save_head
from helpers.hf_models import CONFIGS, PACKED
from helpers.open_clip_models import filled
from helpers.runs import compose
from safetensors.torch import save_file
from torch import Tensor, nn

from clipx.errors import CheckpointError
from clipx.extra.hf_text.weights import folder_of
from clipx.model.clip import CLIP
from clipx.model.freeze import freeze
from clipx.model.spec import ModelSpec
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer
from clipx.weights.load import load_with_spec
from clipx.weights.tower import load_towers, normalization_of

CPU = torch.device("cpu")
# timm's name -> size in pixels, options of a small form.
TIMM = {
    "vit_tiny_patch16_224": (64, {"depth": 2}),
    "test_resnet": (64, {}),
    "eva02_tiny_patch14_224": (56, {"depth": 2}),
    "vit_small_patch14_reg4_dinov2": (56, {"depth": 2}),
    "caformer_s18": (64, {}),  # with an MLP as its classifier
}


def timm_model(name: str, size: int, **options: Any) -> nn.Module:
    fixed = timm.get_pretrained_cfg(name).fixed_input_size
    model: nn.Module = timm.create_model(name, **options, **({"img_size": size} if fixed else {}))
    return filled(model).eval()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def image_words(name: str, size: int, options: Mapping[str, Any]) -> tuple[str, ...]:
    inside = ",".join(f"{key}:{str(value).replace('(', '[').replace(')', ']')}" for key, value in options.items())
    return (f"model.image.timm={name}", f"model.image.size={size}", f"model.image.options={{{inside}}}")


CLIPS = "mean=[0.48145466,0.4578275,0.40821073] std=[0.26862954,0.26130258,0.27577711]"


def normalized(spec: ModelSpec) -> ModelSpec:
    """Returns the model with the mean and std of its weights, as a run resolves it."""
    return replace(spec, image=replace(spec.image, **normalization_of(spec.image)))


def loaded(*words: str) -> tuple[CLIP, list[str]]:
    torch.manual_seed(0)
    spec = normalized(compose("model=tiny", *words).model)
    model = spec.build(CPU, torch.float32)
    freeze(model, spec)
    lines = load_towers(model, spec)
    return model.eval(), lines


@torch.no_grad()
def check_trunk(model: CLIP, twin: Any) -> None:
    """Compares features before the classifier, relative to their size."""
    spec = model.spec.image
    image_BCSS = torch.rand(2, 3, spec.size, spec.size)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in spec.normalization.values())
    expected = twin.forward_head(twin.forward_features((image_BCSS - mean) / std), pre_logits=True)
    found = model.encode_trunk(image_BCSS)
    assert expected.std() > 1e-3
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TIMM)
def test_a_file_of_a_timm_model_gives_the_features_of_timm(name: str, tmp_path: Path) -> None:
    size, options = TIMM[name]
    twin, place = timm_model(name, size, **options), tmp_path / "weights.safetensors"
    save_file(state_of(twin), place)
    model, lines = loaded(*image_words(name, size, options), f"model.image.weights={place}")
    check_trunk(model, twin)
    assert lines[0] == f"image tower: {place}"
    assert lines[1] == f"pixels are normalized by {CLIPS}, not compared with the weights, which have no configuration"
    assert "initialized randomly: image.projection" in lines
    assert any("dropped the classifier" in line for line in lines) == (twin.num_classes > 0)


def test_weights_that_timm_names_are_read_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    twin = timm_model("vit_tiny_patch16_224", 224)
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    folder = tmp_path / f"models--timm--{name}"
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(state_of(twin), folder / "snapshots" / ("0" * 40) / "model.safetensors")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for place in ("timm", f"timm:{name}"):
        words = ("model.image.timm=vit_tiny_patch16_224", "model.image.size=224")
        model, lines = loaded(*words, f"model.image.weights={place}")
        check_trunk(model, twin)
        assert lines[0] == f"image tower: {place}"


def clip_words(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the overrides for a model with the image tower of another one."""
    image = spec.image
    inside = ",".join(f"{key}:{str(value).lower()}" for key, value in image.options.items())
    return (
        f"model.image.timm={image.timm}",
        f"model.image.size={image.size}",
        f"model.image.options={{{inside}}}",
        f"model.image.interpolation={image.interpolation}",
        f"model.image.projection={image.projection}",
        f"model.image.patch_bias={str(image.patch_bias).lower()}",
    )


def hf_folder(folder: Path, name: str, headed: bool) -> Any:
    config = CONFIGS[name]()
    torch.manual_seed(5)
    seq2seq = config.is_encoder_decoder
    masked = "bert" in name
    auto: Any = transformers.AutoModel
    if headed:
        auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
        auto = transformers.AutoModelForSeq2SeqLM if seq2seq else auto
    model = auto.from_config(config)
    filled(model)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model.eval()


@pytest.mark.parametrize(("name", "headed"), [("bert", True), ("qwen3", False), ("qwen3", True), ("mt5", True)])
def test_a_folder_of_transformers_gives_its_features(name: str, headed: bool, tmp_path: Path) -> None:
    twin = hf_folder(tmp_path, name, headed)
    words = ("model/text=hf", "model.text.context_length=12", f"model.text.packed={str(name in PACKED).lower()}")
    model, lines = loaded(*words, f"model.text.source={tmp_path}", f"model.text.weights={tmp_path}")
    encoder = twin.get_encoder() if twin.config.is_encoder_decoder else getattr(twin, twin.base_model_prefix, twin)
    tokens_BL = torch.randint(5, 99, (2, 12))
    with torch.no_grad():
        expected = encoder(tokens_BL).last_hidden_state.mean(1)
        found = model.text.projection.weight @ expected.T
        torch.testing.assert_close(model.text(tokens_BL), found.T, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert "initialized randomly: text.projection" in lines
    dropped = next((line.partition(": ")[2] for line in lines if "dropped the heads" in line), "")
    if name == "qwen3":
        assert dropped == ("lm_head" if headed else "")


def test_parts_of_weights_are_in_their_folder(tmp_path: Path) -> None:
    hf_folder(tmp_path / "model", "bert", headed=False)
    index = tmp_path / "model" / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    (tmp_path / "model" / names["embeddings.word_embeddings.weight"]).rename(tmp_path / "other.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../other.safetensors")}))
    with pytest.raises(CheckpointError, match="index.json does not list the files of the weights: restore it"):
        folder_of(str(tmp_path / "model"))
    index.write_text(json.dumps({"weight_map": {f"{k}": f"{k}.safetensors" for k in range(1001)}}))
    with pytest.raises(CheckpointError, match="index.json lists 1,001 files of weights, more than 1,000: restore it"):
        folder_of(str(tmp_path / "model"))


def test_a_clip_model_of_transformers_gives_both_towers(tmp_path: Path) -> None:
    tower = {"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 8, "hidden_act": "gelu"},
        text_config={
            **tower,
            "max_position_embeddings": 12,
            "hidden_act": "gelu",
            "vocab_size": 49408,
            "eos_token_id": 49407,
        },
        projection_dim=24,
    )
    twin = filled(transformers.CLIPModel(config)).eval()
    twin.save_pretrained(tmp_path)
    transformers.CLIPImageProcessor(image_mean=[0.5, 0.4, 0.3]).save_pretrained(tmp_path)
    weights, spec = load_with_spec(str(tmp_path), "run")
    assert spec.image.mean == [0.5, 0.4, 0.3] and weights.log_scale is not None
    words = (*clip_words(spec), "model.embed_dim=24", "model.text.context_length=12", "model.text.width=48")
    assert isinstance(spec.text, ClipTextSpec)
    words += ("model.text.heads=4", "model.text.layers=2", f"model.text.mlp_ratio={spec.text.mlp_ratio!r}")
    model, lines = loaded(*words, f"model.image.weights={tmp_path}", f"model.text.weights={tmp_path}")
    assert lines == [
        f"image tower: {tmp_path}",
        f"pixels are normalized by mean=[0.5,0.4,0.3] {CLIPS.split()[1]}, as in the training of these weights",
        f"text tower: {tmp_path}",
    ]
    image_BCSS, tokens_BL = torch.rand(2, 3, 32, 32), Tokenizer(12)(["a photo of a cat", "two dogs"])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in spec.image.normalization.values())
    with torch.no_grad():
        expected = twin(pixel_values=(image_BCSS - mean) / std, input_ids=tokens_BL)
        torch.testing.assert_close(model.encode_image(image_BCSS), expected.image_embeds, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.encode_text(tokens_BL), expected.text_embeds, rtol=0, atol=1e-5)


def test_positions_and_patches_of_other_sizes_are_interpolated_as_by_timm(tmp_path: Path) -> None:
    source = timm_model("vit_tiny_patch16_224", 64, depth=2)
    save_file(state_of(source), tmp_path / "weights.safetensors")
    words = image_words("vit_tiny_patch16_224", 48, {"depth": 2, "patch_size": 8})
    model, lines = loaded(*words, f"model.image.weights={tmp_path}/weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors"), "num_classes": 1000}
    twin = timm.create_model(
        "vit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay, img_size=48, patch_size=8, depth=2
    )
    check_trunk(model, twin.eval())
    assert "pos_embed was interpolated from [1, 17, 192] to [1, 37, 192]" in lines
    assert "patch_embed.proj.weight was interpolated from [192, 3, 16, 16] to [192, 3, 8, 8]" in lines


def reference_head(t: Mapping[str, Tensor], x_BNW: Tensor, blocks: int, heads: int) -> Tensor:
    """Reference of the vision head, by its formulas: tokens [B, N, W] -> [B, N, W]."""
    width = x_BNW.shape[-1]

    def norm(name: str, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return (
            centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t[f"{name}.weight"]
            + t[f"{name}.bias"]
        )

    for i in range(blocks):
        b = f"block_list.{i}"
        q, k, v = (norm(f"{b}.norm1", x_BNW) @ t[f"{b}.attn.qkv.weight"].T).chunk(3, -1)
        mixed = []
        for columns in torch.arange(width).chunk(heads):
            scores = q[..., columns] @ k[..., columns].mT / (width / heads) ** 0.5
            mixed.append(scores.softmax(-1) @ v[..., columns])
        x_BNW = x_BNW + t[f"{b}.ls1.gamma"] * (
            torch.cat(mixed, -1) @ t[f"{b}.attn.proj.weight"].T + t[f"{b}.attn.proj.bias"]
        )
        y = norm(f"{b}.norm2", x_BNW)
        w1, w2 = (y @ t[f"{b}.mlp.{w}.weight"].T + t[f"{b}.mlp.{w}.bias"] for w in ("w1", "w2"))
        hidden = w1 / (1 + (-w1).exp()) * w2
        x_BNW = x_BNW + t[f"{b}.ls2.gamma"] * (hidden @ t[f"{b}.mlp.w3.weight"].T + t[f"{b}.mlp.w3.bias"])
    return norm("ln_final", x_BNW)


DINO = ("vit_small_patch14_reg4_dinov2", 56, {"depth": 2, "embed_dim": 48, "num_heads": 4})


def test_a_published_head_of_dino_txt_gives_the_features_of_its_formulas(tmp_path: Path) -> None:
    """Above a trunk of DINOv2 with registers, in float64; the whole tower is then locked."""
    name, size, options = DINO
    head = save_head(tmp_path / "head.pth", 48, 2)
    twin: Any = timm_model(name, size, **options).double()
    torch.save(state_of(twin), tmp_path / "trunk.pt")
    words = (*image_words(name, size, options), "model.embed_dim=96", "model.image.projection=none")
    words += (
        f"model.image.weights={tmp_path}/trunk.pt",
        "model.image.head_blocks=2",
        f"model.image.head_weights={head}",
    )
    spec = normalized(compose("model=tiny", *words, "model.image.lock=all").model)
    model = spec.build(CPU, torch.float64)
    freeze(model, spec)
    lines = load_towers(model, spec)
    assert f"head_blocks: {head}" in lines and not any("randomly" in line for line in lines)
    model.eval()
    image_BCSS = torch.rand(3, 3, size, size, dtype=torch.float64)
    tensors = {key: x.double() for key, x in torch.load(head, weights_only=True).items()}
    with torch.no_grad():
        tokens = reference_head(tensors, twin.forward_features(image_BCSS), 2, 4)
        assert tokens.shape[1] == 1 + 4 + 16
        expected = torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], -1)
        assert expected.std() > 0.1
        torch.testing.assert_close(model.image(image_BCSS), expected, rtol=0, atol=1e-12)


def test_the_head_of_the_published_model_has_its_shapes() -> None:
    image: Any = compose("experiment=dino_txt", "data.shards=x").model.build(torch.device("meta"), torch.float32).image
    published = head_shapes(1024, 2)
    assert published["block_list.0.mlp.w1.weight"] == [2752, 1024]
    assert sorted(list(x.shape) for x in image.head.state_dict().values()) == sorted(published.values())
    assert {m.eps for m in image.head.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    assert image.head.blocks[0].drop_path1.drop_prob == 0.3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ln_final.bias": None}, "ln_final.bias is missing"),
        ({"linear_projection.weight": torch.ones(9, 48)}, "'linear_projection.weight' is unexpected"),
        ({"block_list.1.mlp.w2.bias": torch.ones(192)}, "block_list.1.mlp.w2.bias has shape [192], expected [128]"),
        ({"block_list.2.ls1.gamma": torch.ones(48)}, "'block_list.2.ls1.gamma' is unexpected"),
    ],
)
def test_a_file_of_another_head_is_rejected(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    name, size, options = DINO
    save_file(state_of(timm_model(name, size, **options)), tmp_path / "trunk.safetensors")
    words = (
        *image_words(name, size, options),
        f"model.image.weights={tmp_path}/trunk.safetensors",
        "model.image.head_blocks=2",
    )
    with pytest.raises(CheckpointError) as caught:
        loaded(*words, f"model.image.head_weights={save_head(tmp_path / 'head.pth', 48, 2, changes)}")
    assert f"does not fit 2 blocks above {name}: {says}: give a vision head of dino.txt for this trunk" in str(
        caught.value
    )
