"""Counterparts of flags of open_clip's trainer that depend on several flags, as functions of all that are given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

PLACE = "…"  # where a value is to be written
PLACES = ("hf-hub:", "local-dir:")  # starts of names of models that come with their configuration

MODELS = {
    "RN50": "rn50", "RN101": "rn101", "ViT-S-32": "vit_s32", "ViT-S-16": "vit_s16", "ViT-M-16": "vit_m16",
    "ViT-B-32": "vit_b32", "ViT-B-32-quickgelu": "vit_b32_quickgelu", "ViT-B-16": "vit_b16", "ViT-L-14": "vit_l14",
    "ViT-H-14": "vit_h14", "ViT-g-14": "vit_g14", "ViT-bigG-14": "vit_bigg14", "convnext_base_w": "convnext_base_w",
    "ViT-B-16-SigLIP": "vit_b16_siglip", "coca_ViT-B-32": "coca_vit_b32",
}  # fmt: skip
"""Options of clipx by open_clip's names of the models."""

WEIGHTS = {
    ("ViT-B-32", "laion2b_s34b_b79k"): "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    ("ViT-B-32", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K",
    ("ViT-B-16", "laion2b_s34b_b88k"): "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    ("ViT-B-16", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K",
    ("ViT-L-14", "laion2b_s32b_b82k"): "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
    ("ViT-L-14", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K",
    ("ViT-H-14", "laion2b_s32b_b79k"): "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    ("ViT-g-14", "laion2b_s34b_b88k"): "laion/CLIP-ViT-g-14-laion2B-s34B-b88K",
    ("ViT-bigG-14", "laion2b_s39b_b160k"): "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    ("ViT-B-16-SigLIP", "webli"): "timm/ViT-B-16-SigLIP",
}
"""Repositories of the hub by model and tag of --pretrained, of the most used weights."""

PRECISIONS = {
    "amp": "amp_fp16",
    **dict.fromkeys(("amp_bf16", "amp_bfloat16"), "amp_bf16"),
    **dict.fromkeys(("bf16", "pure_bf16"), "bf16 precision.master_weights=false"),
    **dict.fromkeys(("fp16", "pure_fp16"), "fp16 precision.master_weights=false"),
    "fp32": "fp32 precision.tf32=true",
}
SCHEDULES = {"cosine": "cosine", "const": "constant", "const-cooldown": "constant_cooldown"}
AUGMENTATIONS = {
    "scale": ("data.crop_scale",),
    "ratio": ("data.crop_ratio",),
    "color_jitter": tuple(f"data.augment.color_jitter.{k}" for k in ("brightness", "contrast", "saturation", "hue")),
    "color_jitter_prob": ("data.augment.color_jitter.probability",),
    "gray_scale_prob": ("data.augment.grayscale",),
    "re_prob": ("data.augment.erase",),
}
"""Keys of clipx by the names of --aug-cfg. Several: one for each number of the value."""


@dataclass
class Given:
    """Flags of a command line, which a function of the table reads.

    `values`: the words after each flag, by its name. `typed`: the words that are no flags of open_clip. `world`: number
    of ranks, 1 if unknown. `notes`: what the functions have to say beside their overrides.
    """

    values: dict[str, list[str]]
    typed: Sequence[str] = ()
    world: int = 1
    notes: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, default: str = "") -> str:
        """Returns the value of a flag, PLACE if it has none, or the default if the flag is not given."""
        return " ".join(self.values[name]) or PLACE if name in self.values else default

    def choose(self, name: str, template: str, choices: Mapping[str, str], fix: str = "") -> list[str]:
        """Returns the template with the choice for the value of a flag; PLACE and a note for a value without one."""
        value = self.get(name)
        if value not in choices and value != PLACE:
            known = ", ".join(dict.fromkeys(text.partition(" ")[0] for text in choices.values()))
            self.notes.append(f"--{name} {value} has no counterpart: choose one of {known}{fix}")
        return template.replace("{}", choices.get(value, PLACE)).split()


def hydra_value(text: str) -> str:
    """Returns a text as a value in Hydra's grammar, as `hydra_override` accepts it."""
    plain = text and re.fullmatch(r"[\w/:.@%+*?$ -]*", re.sub(r"\$?\{[\w.,-]*\}", "", text), re.ASCII)
    if (plain and text == text.strip() and text[0] != "{") or text == PLACE:
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), text) + "'"


def _product(*factors: str) -> str:
    return str(math.prod(map(int, factors))) if all(map(str.isdecimal, factors)) else PLACE


def _is_table(given: Given, path: str) -> bool:
    kind = given.get("dataset-type", "auto")
    return kind == "csv" or (kind == "auto" and path.lower().endswith((".csv", ".tsv")))


def _shards(text: str) -> str:
    """Returns shards as a value, with URLs in place of commands that print them."""
    return hydra_value(re.sub(r"pipe:[^:]*?\s(\w+://\S+)(?: -)?", r"\1", text))


def data(given: Given) -> list[str]:
    path, kind = given.get("train-data"), given.get("dataset-type")
    table_flags = [name for name in given.values if name.startswith("csv-")]
    words = []
    if kind == "synthetic":
        return ["data=shapes"]
    if _is_table(given, path) or (not path and table_flags):
        names = {"\t": "tab", "\\t": "tab", ",": "comma", ";": "semicolon", "|": "pipe"}
        separator = given.get("csv-separator", "\t")
        words += ["data=csv", f"data.path={hydra_value(path or PLACE)}"]
        words += [f"data.separator={names.get(separator) or hydra_value(separator)}"]
        words += [f"data.image_column={hydra_value(given.get('csv-img-key'))}"] if "csv-img-key" in given else []
        words += [f"data.caption_column={hydra_value(given.get('csv-caption-key', 'title'))}"]
    elif "train-data-upsampling-factors" in given:
        words += _mixture(given, path.split("::"), given.get("train-data-upsampling-factors").split("::"))
    elif path or kind == "webdataset":
        words += ["data=webdataset", f"data.shards={_shards(path or PLACE)}"]
    if path and "model" not in given and not any(word.startswith(("model=", "experiment=")) for word in given.typed):
        given.notes.append("open_clip's default model is RN50")
        words.append("model=rn50")
    return words


def _mixture(given: Given, paths: Sequence[str], factors: Sequence[str]) -> list[str]:
    given.notes.append("data.sources.NAME.weight is a share of each batch: multiply the factor by the source's size")
    words = ["data=mixture"]
    for name, shards, factor in zip("abcdefghijklmnopqrstuvwxyz", paths, factors, strict=False):
        source = f"data.sources.{name}"
        words += [
            f"+data@{source}=webdataset",
            f"{source}.shards={_shards(shards or PLACE)}",
            f"{source}.weight={factor}",
        ]
    return words


def resampled(given: Given) -> list[str]:
    sources = [word.partition("=")[0].partition("@")[2] for word in data(given) if word.startswith("+data@")]
    return [f"{source}.replacement=true" for source in sources or ["data"]]


def held_out(given: Given) -> list[str]:
    path = given.get("val-data")
    if _is_table(given, path):
        return [f"data.held_out_path={hydra_value(path)}"]
    mixture = "train-data-upsampling-factors" in given
    return [f"{'data.sources.a' if mixture else 'data'}.held_out_shards={_shards(path)}"] + [
        "data.held_out=a"
    ] * mixture


def imagenet_sets(given: Given) -> dict[str, str]:
    """Returns the folders of ImageNet and of ImageNetV2 that are given, by the names of the sets."""
    found = {}
    if "imagenet-val" in given:
        found["imagenet"] = given.get("imagenet-val")
    if "imagenet-v2" in given:
        found["v2"] = f"{given.get('imagenet-v2').rstrip('/')}/ImageNetV2-matched-frequency"
    return found


IMAGENET = ["evaluator.zeroshot.classnames=imagenet", "evaluator.zeroshot.templates=openai_imagenet"]


def evaluation(given: Given) -> list[str]:
    every, often = given.get("zeroshot-frequency", "2"), given.get("val-frequency", "1")
    sets = imagenet_sets(given) if every != "0" else {}
    retrieval = "val-data" in given and often != "0"
    if "zeroshot-frequency" in given and not imagenet_sets(given):
        given.notes.append("--zeroshot-frequency is of --imagenet-val")
    if "val-frequency" in given and "val-data" not in given:
        given.notes.append("--val-frequency is of --val-data")
    words = []
    if imagenet_sets(given) or ("val-data" in given and not retrieval):
        names = ["zeroshot"] * bool(sets) + ["retrieval"] * retrieval
        words += [f"evaluator=[{','.join(names)}]"]
        words += ["data.held_out_share=0"] if "train-data" in given and "val-data" not in given else []
    if sets:
        words += ["evaluator.zeroshot.held_out=false", *IMAGENET]
        words += [f"evaluator.zeroshot.every={every}ep"] if "zeroshot-frequency" in given else []
    for name, path in sets.items():
        key = f"evaluator.zeroshot.sets.{name}"
        words += [f"+data@{key}=folder", f"{key}.path={hydra_value(path)}"]
    return words + ([f"evaluator.retrieval.every={often}ep"] if retrieval and "val-frequency" in given else [])


def augmentation(given: Given) -> list[str]:
    words = []
    for pair in given.values["aug-cfg"]:
        name, _, value = pair.partition("=")
        keys, text = AUGMENTATIONS.get(name, ()), value.replace(" ", "").strip("()[]")
        numbers = text.split(",")
        if name in ("scale", "ratio"):
            words.append(f"{keys[0]}=[{text}]")
        elif keys and len(numbers) == len(keys):
            words += [f"{key}={number}" for key, number in zip(keys, numbers, strict=True)]
        elif name != "use_timm":
            given.notes.append(f"--aug-cfg {pair} has no counterpart: data.augment has what there is")
    return words or ["data.crop_scale=[…,…]"]


def batch(given: Given) -> list[str]:
    size, micro, words = given.get("batch-size"), given.get("accum-freq"), []
    if size:
        words.append(f"data.batch_size={_product(size, micro or '1', str(given.world))}")
        factors = f"{size} x {micro} micro-batches" if micro else size
        ranks = f" x {given.world} ranks" if given.world > 1 else ", times the number of GPUs if there are several"
        given.notes.append(f"data.batch_size is the batch of all ranks together: {factors}{ranks}")
    elif micro:
        given.notes.append("data.batch_size is divided by data.micro_batches, not multiplied")
    return words + ([f"data.micro_batches={micro}"] if micro else [])


def model(given: Given) -> list[str]:
    name = given.get("model")
    if name.startswith(PLACES):
        return ["model=weights", f"model.weights={hydra_value(name)}"]
    return given.choose("model", "model={}", MODELS, "; other towers of timm are model.image.timm=NAME")


def _weights(given: Given, tag: str, model: str) -> str:
    """Returns where the weights are that --pretrained names: a file, a URL, or a tag of open_clip."""
    if re.search(r"[/.:]", tag) or tag == PLACE:
        return hydra_value(tag)
    if found := WEIGHTS.get((model, tag)):
        return f"hf-hub:{found}"
    given.notes.append(f"clipx does not know the tag {tag} of {model}: write a file, a URL or hf-hub:ORG/NAME")
    return PLACE


def pretrained(given: Given) -> list[str]:
    return [f"model.weights={_weights(given, given.get('pretrained'), given.get('model', 'RN50'))}"]


def teacher(given: Given) -> list[str]:
    weights = _weights(given, given.get("distill-pretrained", PLACE), given.get("distill-model", PLACE))
    return ["objective=distillation", f"teacher.weights={weights}"]


def lock(side: str, groups: str) -> Callable[[Given], list[str]]:
    """Returns the function for the lock of a tower. open_clip's own towers count the projection as a group."""

    def lock(given: Given) -> list[str]:
        number = given.get(groups, "0")
        if side == "image" and given.get("model") in ("convnext_base_w", "ViT-B-16-SigLIP"):  # towers of timm
            return [f"model.image.lock={number}"]
        own = "all" if number == "0" else str(int(number) - 1) if number.isdecimal() else PLACE
        return [f"model.{side}.lock={own}"]

    return lock


def image_size(given: Given) -> list[str]:
    sizes = [*dict.fromkeys(given.values["force-image-size"]), PLACE]
    if len(sizes) > 2:
        given.notes.append("images are square: give one size")
    return [f"model.image.size={sizes[0]}"]


def duration(given: Given) -> list[str]:
    samples = given.get("train-num-samples")
    if samples and "dataset-resampled" in given:
        return [f"duration={_product(given.get('epochs', '32'), samples)}sa"]
    return [f"duration={given.get('epochs')}ep"] if "epochs" in given else []


def betas(given: Given) -> list[str]:
    second = "0.98" if "vit" in given.get("model", "RN50").lower() else "0.999"  # open_clip's defaults
    return [f"optimizer.betas=[{given.get('beta1', '0.9')},{given.get('beta2', second)}]"]


def momentum(given: Given) -> list[str]:
    return ([] if "opt" in given else ["optimizer=sgd"]) + [f"optimizer.momentum={given.get('momentum')}"]


def schedule(given: Given) -> list[str]:
    if "skip-scheduler" in given:
        return ["schedule=constant", "schedule.warmup=0st"]
    cooldown = {
        "epochs-cooldown": f"schedule.cooldown={given.get('epochs-cooldown')}ep",
        "lr-cooldown-end": f"schedule.min_lr={given.get('lr-cooldown-end')}",
        "lr-cooldown-power": f"schedule.power={given.get('lr-cooldown-power')}",
    }
    ends = [word for name, word in cooldown.items() if name in given]
    words = given.choose("lr-scheduler", "schedule={}", SCHEDULES) if "lr-scheduler" in given else []
    words = words or ["schedule=constant_cooldown"] * bool(ends)
    words += ends if words == ["schedule=constant_cooldown"] else []
    return words + ([f"schedule.warmup={given.get('warmup')}st"] if "warmup" in given else [])


def precision(given: Given) -> list[str]:
    if "use-bnb-linear" in given:
        return ["precision=int8"]
    words = given.choose("precision", "precision={}", PRECISIONS)
    return [word for word in words if word != "precision.tf32=true" or given.get("device") != "cpu"]  # an error there


def logs(given: Given) -> list[str]:
    folder, name = given.get("logs").rstrip("/"), given.get("name", "${name}")
    if folder.lower() == "none":
        given.notes.append("--logs none has no counterpart, because a run always has a folder")
        return []
    return [f"run_dir={hydra_value(f'{folder}/{name}') if folder != PLACE else PLACE}"]


def logger(given: Given) -> list[str]:
    to = given.get("report-to")
    names = [name for name in ("tensorboard", "wandb") if name in to or "all" in to]
    words = []
    if "wandb-project-name" in given:
        names += ["wandb"] if "wandb" not in names else []
        words.append(f"logger.wandb.project={hydra_value(given.get('wandb-project-name'))}")
    return [f"logger=[{PLACE if to == PLACE else ','.join(names)}]", *words]


def saving(given: Given) -> list[str]:
    number, recent = given.get("save-frequency"), "save-most-recent" in given
    one = recent or "delete-previous-checkpoint" in given
    words = []
    if number == "0" and not recent:
        words.append("checkpoint.every=end")
    elif number:
        words.append(f"checkpoint.every={'1' if recent else number}ep")
    if number not in ("", "0") and "delete-previous-checkpoint" not in given:
        words.append(f"checkpoint.keep_every={number}ep")
    return words + ["checkpoint.keep_last=1"] * one


def evaluated(given: Given) -> list[str]:
    """Returns the overrides of clipx.evaluate for a command that only evaluates: weights, and one set."""
    name = given.get("model", "RN50")
    run = name if name.startswith(PLACES) else _weights(given, given.get("pretrained", PLACE), name)
    words = [f"run={run}"] + (model(given) if run.endswith((".pt", ".bin", ".safetensors")) else [])
    sets = list(imagenet_sets(given).values())
    if sets:
        words += ["data=folder", f"data.path={hydra_value(sets[0])}", "evaluator=[zeroshot]", *IMAGENET]
    elif "val-data" in given:
        words += [
            *data(Given({**given.values, "train-data": given.values["val-data"]}, ["model="])),
            "evaluator=[retrieval]",
        ]
    if sets[1:] or (sets and "val-data" in given):
        given.notes.append("each set is evaluated by a command")
    words += [f"data.workers={given.get('workers')}"] if "workers" in given else []
    return words + (precision(given) if "precision" in given else [])
