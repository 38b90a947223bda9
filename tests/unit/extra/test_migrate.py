"""The pages for users of open_clip and of FastCLIP: every flag is accounted for, and every counterpart composes."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest
from helpers.documentation import blocks
from helpers.migration import FASTCLIP, OPEN_CLIP, counterparts, tables, translated
from helpers.open_clip_parser import open_clip_actions, open_clip_parser
from open_clip.pretrained import get_pretrained_cfg

from clipx.extra.open_clip.command_line import answer, read, translate
from clipx.extra.open_clip.flags import FLAGS, NONE, NUMBERS, ONE, PAIRS
from clipx.extra.open_clip.rules import MODELS, WEIGHTS

# FastCLIP's code is no package that an index has. These are the flags that src/training/params.py of
# https://github.com/Optimization-AI/fast_clip at commit 6394f928765770dbf9ba33333ca09b9edbb73e3a adds to open_clip's,
# and the flags of open_clip 3.3 that it does not have, with its defaults.
FASTCLIP_FLAGS: dict[str, object] = {
    "--optimizer": "adamw",
    "--lr_tau": -1.0,
    "--lr_tau_scheduler": "cosine",
    "--temperature_scheme": "global_learnable",
    "--profile": False,
    "--lr_min": 0.0,
    "--fastclip": False,
    "--gamma": 0.8,
    "--gamma_schedule": "cosine",
    "--gamma_decay_epochs": 10,
    "--rho": 8.0,
    "--fastclip_eps": 1e-14,
    "--multiply_tau": False,
    "--temperature": 0.07,
    "--data_size": -1,
}
NOT_IN_FASTCLIP = (
    *("--opt", "--momentum", "--device", "--cache-dir", "--loss-dist-impl", "--force-context-length"),
    *("--image-interpolation", "--image-resize-mode"),
)
# Commands of open_clip, and what is answered: other forms of a flag than on the page, and flags that depend on others.
COMMANDS = {
    "--train-data={0..9}.tar --dataset-type=auto --batch-size=128 --precision=amp --workers=4 --local-loss": (
        "data=webdataset data.shards=\"'{0..9}.tar'\" model=rn50 data.batch_size=1024 precision=amp_fp16 data.workers=4"
    ),
    "--train_data train.csv --val_data val.csv --csv-caption-key text --model ViT-B-32 --opt timm/lion --beta2 0.99": (
        "data=csv data.path=train.csv data.separator=tab data.caption_column=text data.held_out_path=val.csv model=vit_b32 "
        "optimizer=lion optimizer.betas='[0.9,0.99]'"
    ),
    "--train-data 's3://b/{0..9}.tar::pipe:aws s3 cp s3://c/{0..9}.tar -' --dataset-resampled --train-num-samples 1000 "
    "--epochs 3 --model ViT-B-16 --save-frequency 2 --save-most-recent --resume latest --report-to all "
    "--logs /scratch/logs/ --name 'b16, again'": (
        "data=webdataset data.shards='s3://b/{0..9}.tar::s3://c/{0..9}.tar' data.replacement=true duration=3000sa "
        "model=vit_b16 checkpoint.every=1ep checkpoint.keep_every=2ep checkpoint.keep_last=1 resume=latest "
        """logger='[tensorboard,wandb]' run_dir="'/scratch/logs/b16, again'" name="'b16, again'\""""
    ),
    "--train-data a.tar --val-data b.tar --val-frequency 2 --imagenet-val /in --imagenet-v2 /v2 --model RN101 "
    "--zeroshot-frequency 1 --logs /scratch": (
        "data=webdataset data.shards=a.tar data.held_out_shards=b.tar evaluator='[zeroshot,retrieval]' "
        "evaluator.zeroshot.held_out=false evaluator.zeroshot.classnames=imagenet "
        "evaluator.zeroshot.templates=openai_imagenet evaluator.zeroshot.every=1ep "
        "+data@evaluator.zeroshot.sets.imagenet=folder evaluator.zeroshot.sets.imagenet.path=/in "
        "+data@evaluator.zeroshot.sets.v2=folder evaluator.zeroshot.sets.v2.path=/v2/ImageNetV2-matched-frequency "
        "evaluator.retrieval.every=2ep model=rn101 run_dir='/scratch/${name}'"
    ),
    "--train-data a.tar --imagenet-val /in --zeroshot-frequency 0 --model convnext_base_w --lock-image --pretrained "
    "laion2b_s13b_b82k --pretrained w.pt --delete-previous-checkpoint --save-frequency 1": (
        "data=webdataset data.shards=a.tar evaluator='[]' data.held_out_share=0 model=convnext_base_w model.image.lock=0 "
        "model.weights=w.pt checkpoint.every=1ep checkpoint.keep_last=1"
    ),
    "--dataset-type synthetic --model ViT-B-16-SigLIP --siglip --lock-text --lock-text-unlocked-layers 1 --pretrained "
    "webli --force-image-size 224 224 --image-mean 0.5 0.5 0.5 --skip-scheduler --warmup 100 --use-bnb-linear X "
    "--precision bf16 seed=3 --save-frequency 0": (
        "data=shapes model=vit_b16_siglip objective=siglip model.text.lock=0 model.weights=hf-hub:timm/ViT-B-16-SigLIP "
        "model.image.size=224 model.image.mean='[0.5,0.5,0.5]' schedule=constant schedule.warmup=0st precision=int8 "
        "checkpoint.every=end seed=3"
    ),
    "--aug-cfg scale='(0.4, 1.0)' color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8 gray_scale_prob=0.2 "
    "use_timm=True re_prob=0.1 --lr 1e-3 optimizer.lr=2e-3 --resume a/epoch_1.pt": (
        "data.crop_scale='[0.4,1.0]' data.augment.color_jitter.brightness=0.32 data.augment.color_jitter.contrast=0.32 "
        "data.augment.color_jitter.saturation=0.32 data.augment.color_jitter.hue=0.08 "
        "data.augment.color_jitter.probability=0.8 data.augment.grayscale=0.2 data.augment.erase=0.1 "
        "resume=a/epoch_1.pt optimizer.lr=2e-3"
    ),
}
# What is said of a value without a counterpart, and of a command that is none of a training.
NOTES = {
    "--model ViT-L-16": "write START clipx.train model=… (--model ViT-L-16 has no counterpart: choose one of rn50, ",
    "--opt timm/adan --precision fp8": "optimizer=… precision=… (--opt timm/adan has no counterpart: choose one of adamw",
    "--model RN50 --pretrained openai": "model.weights=… (clipx does not know the tag openai of RN50: write a file",
    "--image-interpolation random": "model.image.interpolation=… (--image-interpolation random has no counterpart",
    "--aug-cfg re_count=3": "(--aug-cfg re_count=3 has no counterpart",
    "--batch-size 64 --accum-freq 2": "data.batch_size is the batch of all ranks together: 64 x 2 micro-batches x 8 ranks",
    "--local-loss --gather-with-grad": "--local-loss and --gather-with-grad are flags of open_clip 3.3: remove them (",
    "--lr": "--lr is a flag of open_clip 3.3: write START clipx.train optimizer.lr=…",
    "--lr 1 --fastclip --gamma 0.2 -m seed=1,2": "optimizer.lr=1 -m seed=1,2 (--fastclip is a flag of neither and left out; --gamma is a",
    "--zeroshot-frequency 1": "remove it (--zeroshot-frequency is of --imagenet-val)",
    "--imagenet-val /in --model ViT-B-32 --pretrained w.pt --workers 2": (
        "write START clipx.evaluate run=w.pt model=vit_b32 data=folder data.path=/in evaluator='[zeroshot]' "
        "evaluator.zeroshot.classnames=imagenet evaluator.zeroshot.templates=openai_imagenet data.workers=2"
    ),
    "--val-data v.tar --model hf-hub:org/name": (
        "write START clipx.evaluate run=hf-hub:org/name data=webdataset data.shards=v.tar evaluator='[retrieval]'"
    ),
    "--model hf-hub:org/name": "write START clipx.train model=weights model.weights=hf-hub:org/name",
}


def flags_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def answered(command: str) -> str:
    return answer(shlex.split(command), ["--multirun", "-m"], program=["START"], world=8)


def test_the_table_of_the_page_is_the_table_of_flags() -> None:
    rows = counterparts(OPEN_CLIP)
    assert sorted(words[0] for words, _ in rows) == sorted({*open_clip_actions()} - {"--beta2"})  # it is in beta1's row
    for words, overrides in rows:
        open_clip_parser().parse_args(words)
        assert translate(read([*words, "model=vit_b32"], world=8)) == overrides, words
    names = [row for row in tables(OPEN_CLIP)["Names of the models"] for row in zip(*map(codes, row), strict=True)]
    assert dict(names) == MODELS
    values = {code: overrides for (name,), (overrides,), _ in formats() for code in [name]}
    assert {name: " ".join(translate(read([f"--precision={name}"]))) for name in values} == values


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def formats() -> list[list[list[str]]]:
    return [[*map(codes, row)] for row in tables(OPEN_CLIP)["Values of `--precision`"]]


def test_the_documented_command_is_translated_as_the_page_shows_it() -> None:
    lines = [" ".join(block.text.replace("\\\n", " ").split()) for block in blocks("docs/migrate/open_clip.md")]
    example, theirs, ours = lines[:3]
    typed, _, shown = example.partition(" error: ")
    assert answer(shlex.split(typed.removeprefix("$ python -m clipx.train"))) == shown
    start, module, words = theirs.partition(" -m open_clip_train.main ")
    assert module
    message = answer(shlex.split(words), program=[*start.split(), "-m"], world=8)
    assert message.partition(": write ")[2].partition(" (")[0] == ours


def test_the_flags_take_the_words_that_open_clip_gives_them() -> None:
    takes = {0: NONE, None: ONE, "+": NUMBERS, "*": PAIRS}
    assert {name: flag.takes for name, flag in FLAGS.items()} == {
        flag.removeprefix("--"): takes[action.nargs] for flag, action in open_clip_actions().items()
    }
    for command in COMMANDS:
        words = [re.sub(r"(?<=^--\w\w\w\w\w)_|(?<=^--val)_", "-", word) for word in shlex.split(command)]
        parsed = open_clip_parser().parse_args([word for word in words if not word.startswith(("seed=", "optimizer."))])
        for name, values in read(shlex.split(command)).values.items():
            action = open_clip_actions()[f"--{name}"]
            typed = [action.type(value) if callable(action.type) else value for value in values]
            expected = getattr(parsed, action.dest)
            assert {"*": [*map(str, values)] and expected, "+": typed, 0: True, None: typed[-1:]}[action.nargs] == (
                [expected] if action.nargs is None else expected
            ), name


def test_tags_of_weights_are_those_of_open_clip() -> None:
    for (model, tag), repository in WEIGHTS.items():
        assert get_pretrained_cfg(model, tag)["hf_hub"] == f"{repository}/"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_command_is_translated_and_composes(command: str) -> None:
    line = answered(command).partition(": write START clipx.train ")[2].partition(" (")[0]
    assert line == COMMANDS[command]
    translated(shlex.split(line))


@pytest.mark.parametrize("command", NOTES)
def test_what_has_no_counterpart_is_said(command: str) -> None:
    message = answered(command)
    assert NOTES[command] in message and message.isprintable()


def test_other_commands_name_the_counterpart_in_training() -> None:
    message = answer(["--lr", "1e-3", "--name=x"], command="export")
    assert message == (
        "--lr and --name are flags of open_clip 3.3's trainer: clipx.train has optimizer.lr=1e-3 name=x, --help lists the "
        "keys of this command"
    )
    assert "clipx.evaluate run=… data=folder data.path=/in " in answer(["--imagenet-val", "/in"], command="evaluate")


def fastclip_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(parents=[open_clip_parser()], add_help=False, conflict_handler="resolve")
    for flag, default in FASTCLIP_FLAGS.items():
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser


def test_the_table_accounts_for_each_flag_that_fastclip_adds_once() -> None:
    assert not FASTCLIP_FLAGS.keys() & open_clip_actions().keys() and set(NOT_IN_FASTCLIP) <= open_clip_actions().keys()
    rows = counterparts(FASTCLIP)
    assert sorted(flag for words, _ in rows for flag in flags_of(words)) == sorted(FASTCLIP_FLAGS)
    for words, _ in rows:
        fastclip_parser().parse_args(words)
    text = FASTCLIP.read_text()
    assert all(f"`{flag}`" in text for flag in NOT_IN_FASTCLIP)
