"""Each feature in the same four ways: on two ranks in micro-batches, resumed and exported, and in one process.

A row of `ROWS` is a feature. One process trains three steps on whole batches in float64. Two ranks train in two
micro-batches each, and must give its losses, metrics, weights and states to 1e-9. They resume from the second step and
must give their own tensors bit for bit. The exported weights must be those of the run.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from string import Template

import pytest
import torch
from helpers.cases import slow_except
from helpers.inputs import DATA, Inputs
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, compose, tensors, untimed_rows

from clipx.export import export
from clipx.trainer.spec import RunSpec
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_weights

STEPS = 3
# Three batches of 36 in epochs of 75 samples: the third has samples of the first again.
RUN = (
    *(word for word in SMALL if "samples=" not in word),
    *("data.batch_size=36", f"duration={STEPS}st", "precision=fp64", "optimizer.clip_norm=0.5"),
    *("optimizer.ema_decay=0.9", "checkpoint.every=2st", "checkpoint.keep_last=9"),
    *("evaluator=[retrieval]", "evaluator.retrieval.every=2st"),
)
FSDP = "distributed=fsdp"
COMPILED = "compile.towers=true compile.backend=aot_eager"
# Its tokenizer knows so few words that captions are equal, and rounding decides their ranks: no evaluation.
HF = "model/text=hf model.text.context_length=24 ~evaluator.retrieval"
TINY_TEXT = "model.text.width=16 model.text.heads=2"
SHAPES, IMAGE = " ".join(DATA), " ".join(VIT[:2])


@dataclass(frozen=True)
class Row:
    """One feature. `words` may name values of `helpers.inputs` by $name."""

    proves: str
    words: str = ""
    on_ranks: str = ""  # further words of the run on two ranks
    base: str = " ".join((*VIT, *DATA))  # the words before them
    same: bool = True  # as in one process; not with random numbers of a rank's own
    slow: bool = False  # the proof of another row or a cheaper test, for one more option


ROWS = {
    # objectives
    "infonce": Row("the loss of CLIP sees the pairs of both ranks"),
    "siglip": Row("the loss of SigLIP has a bias, which is exported", "objective=siglip", FSDP),
    "fastclip_v3": Row("state of samples lies on the ranks, and gamma falls", "objective=fastclip_v3 objective.rho=2"),
    "fastclip_v2": Row("each sample has temperatures", "objective=fastclip_v2 objective.rho=2", FSDP, slow=True),
    "neuclip": Row(
        "prototypes are the same on all ranks, and are replaced before and after the checkpoint",
        "objective=neuclip objective.prototypes=50 objective.updates=2 objective.restart=2st objective.rho=2",
        slow=True,
    ),
    "captions": Row(
        "samples have three captions, some of which are those of others",
        "objective.same_caption=positive data.captions_per_step=3 data.sub_captions=2",
        FSDP,
    ),
    "superclip": Row(
        "a head of the image trunk predicts tokens, and counts the captions of both ranks",
        "objective=superclip",
        f"{FSDP} model.image.checkpointing=tower",
        slow=True,
    ),
    "coca": Row(
        "captions are predicted, of different lengths on the ranks",
        "model=coca_tiny model.image.options={patch_size:16,embed_dim:48,depth:1,num_heads:2} model.embed_dim=32 "
        "model.text.width=32 model.text.layers=1 model.decoder.layers=1 model.queries=5 data.batch_size=12",
        FSDP,
        base=SHAPES,
        slow=True,
    ),
    "classification": Row(
        "a head learns labels beside a locked text tower",
        "objective=classification model.weights=$run model.text.lock=all objective.label_smoothing=0.1",
        FSDP,
        slow=True,
    ),
    "distillation": Row(
        "a live teacher embeds the batch in the micro-batches of the run",
        "objective=distillation teacher.weights=$run",
        "data.micro_batches=3",
        slow=True,
    ),
    "views": Row(
        "loader processes read the views of an ensemble of teachers, drawn by position",
        "objective=distillation teacher.embeddings=$views teacher.temperature=[0.1,0.2] data.crop_scale=[0.3,1.0]",
        f"{FSDP} data.workers=1",
        slow=True,
    ),
    "drrho_clip": Row(
        "stored similarities of a reference",
        "objective=drrho_clip teacher.embeddings=$embeddings objective.rho=2",
        slow=True,
    ),
    # towers
    "lora": Row(
        "dropout of adapters resumes",
        "model.weights=$run model.image.lora.rank=3 model.image.lora.dropout=0.2 model.image.lora.dora=true "
        "model.text.lora.rank=2 model.text.lora.last=1 optimizer.layer_decay=0.5",
        same=False,
    ),
    "dora": Row(
        "one row of A on two ranks: the shard of the second is empty",
        "model.weights=$run model.image.lora.dora=true model.text.lora.dora=true model.image.lora.rank=1 "
        "model.text.lora.rank=5 model.text.lora.layers=[attn.*,mlp.fc1]",
        FSDP,
        slow=True,
    ),
    "lit": Row(
        "a locked trunk of timm has new blocks above it",
        "model.image.timm=vit_tiny_patch16_224 model.image.options={depth:2,embed_dim:48,num_heads:4} "
        "model.image.weights=$trunk model.image.lock=0 model.image.head_blocks=1 model.image.head_weights=$head",
        f"{FSDP} model.image.checkpointing=1",
        slow=True,
    ),
    "native": Row(
        "images at their own aspect ratio are packed by their tokens",
        "model=naflex_tiny model.image.max_tokens=20 data=webdataset data.shards=$aspects data.held_out_share=0.2 "
        "model.image.options={patch_size:8,embed_dim:32,depth:2,num_heads:2,pos_embed_grid_size:[4,4]} " + TINY_TEXT,
        f"{FSDP} model.image.checkpointing=1",
        base="",
    ),
    "features": Row(
        "a text tower learns from stored features",
        "model=stored_features model.image.features=64 data=webdataset data.shards=$features/train/*.tar "
        "data.held_out_shards=$features/held_out/*.tar data.caption_key=json.captions model.image.projection=linear "
        "model.text.tokenizer=$features/words.json model.text.vocabulary=$words model.text.pool=last "
        "model.text.packed=false model.text.context_length=20 " + TINY_TEXT,
        FSDP,
        base="",
    ),
    "xlm_roberta": Row(
        "texts of a model of transformers are packed",
        f"{HF} model.text.source=$xlm_roberta "
        "model.text.options={hidden_dropout_prob:0.0,attention_probs_dropout_prob:0.0}",
        f"{FSDP} model.text.checkpointing=1",
        base=f"{IMAGE} {SHAPES}",
        slow=True,
    ),
    "dropout": Row(
        "random numbers of each rank resume",
        "+model.image.options.proj_drop_rate=0.1 model.patch_dropout=0.5",
        same=False,
    ),
    "batchnorm": Row(
        "norms of a ResNet see the samples of all ranks",
        "model=tiny",
        "distributed.sync_batchnorm=true data.micro_batches=1",
        base=SHAPES,
        slow=True,
    ),
    # data, optimizers, distribution
    "augment": Row(
        "crops, colours and masked words depend on the sample alone",
        "data.augment={flip:0.5,rand_augment:{operations:1},color_jitter:{probability:0.8},grayscale:0.2,erase:0.5} "
        "data.crop_ratio=[0.5,2] data.caption_mask={rule:random,share:0.6}",
        "data.workers=1",
    ),
    "mixture": Row(
        "sources keep their shares, and each sample of theirs its state",
        "data=mixture +data@data.sources.scenes=shapes data.sources.scenes.samples=50 "
        "data.sources.scenes.held_out_samples=20 data.sources.scenes.weight=3 +data@data.sources.pictures=csv "
        "data.sources.pictures.path=$table data.sources.pictures.held_out_share=0.1 "
        "objective=fastclip_v1",
        base=" ".join(VIT),
        slow=True,
    ),
    "parquet": Row(
        "row groups are read in streams and shuffled within a window",
        "data=parquet data.path=$parquet data.held_out_share=0.2 data.streams=4 data.shuffle_window=20",
        "data.workers=1",
        base=" ".join(VIT),
        slow=True,
    ),
    "stages": Row(
        "the image size changes in the middle", "stages=[{until:2st,image_size:32},{image_size:48}]", slow=True
    ),
    "muon": Row("the optimizer needs whole matrices", "optimizer=muon", FSDP),
    "lamb": Row("the optimizer needs norms of whole tensors", "optimizer=lamb", FSDP, slow=True),
    "recomputed": Row(
        "layers stay gathered and are computed again in backward; evaluations see the average of their step",
        "optimizer.lr=0.02 optimizer.ema_decay=0.5 evaluator.retrieval.every=1st",
        f"{FSDP} model.image.checkpointing=1 model.text.checkpointing=1 distributed.reshard_after_forward=false",
        slow=True,
    ),
    "compiled_captions": Row(
        "towers and tiles are compiled with DDP",
        "objective.same_caption=positive data.captions_per_step=3",
        f"{COMPILED} compile.objective=true",
        slow=True,
    ),
}


def spec(run_dir: Path, *words: str) -> RunSpec:
    return compose(*RUN, *words, f"run_dir={run_dir}", f"name={run_dir.name}")


def train(spec: RunSpec) -> None:
    Trainer(spec).fit()


@pytest.mark.parametrize("name", slow_except(ROWS, *(name for name, row in ROWS.items() if not row.slow)))
def test_row(name: str, two_ranks: Ranks, inputs: Inputs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = ROWS[name]
    words = [Template(word).substitute(inputs) for word in f"{row.base} {row.words}".split()]
    spread = [*words, "data.micro_batches=2", *row.on_ranks.split()]
    alone, ranks, again = (tmp_path / run for run in ("alone", "ranks", "again"))
    two_ranks.call(train, spec(ranks, *spread))
    found = tensors(ranks, STEPS)
    if row.same:
        train(spec(alone, *words))
        _assert_close(found, tensors(alone, STEPS), row.proves)
        for own, other in zip(untimed_rows(ranks), untimed_rows(alone), strict=True):
            assert own == pytest.approx(other, rel=1e-9, abs=1e-9), f"two ranks: {row.proves}"

    shutil.copytree(ranks, again)
    two_ranks.call(train, spec(again, *spread, "resume=step:2"))
    resumed = tensors(again, STEPS)
    assert resumed.keys() == found.keys()
    different = [key for key, value in found.items() if not torch.equal(resumed[key].nan_to_num(), value.nan_to_num())]
    assert different == [], f"resumed: {row.proves}"
    assert untimed_rows(again) == untimed_rows(ranks), f"resumed: {row.proves}"

    out = tmp_path / "out.safetensors"
    export(compose(f"run={ranks}", f"out={out}", "format=safetensors", config_name="export"))  # type: ignore[arg-type]
    exported, whole = load_weights(str(out)), load_weights(str(ranks))
    assert exported.model.keys() == whole.model.keys()
    different = [key for key, value in whole.model.items() if not torch.equal(exported.model[key], value)]
    assert different == [], f"exported: {row.proves}"
    assert exported.bias == whole.bias, f"exported: {row.proves}"
    if whole.log_scale is not None:  # this run learns one
        assert exported.log_scale == whole.log_scale, f"exported: {row.proves}"
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], proves: str) -> None:
    assert found.keys() == expected.keys(), f"two ranks: {proves}"
    for key, value in expected.items():
        if key != "rng":  # one for each rank
            close = torch.isclose(found[key], value, rtol=1e-9, atol=1e-9, equal_nan=True)
            assert close.all(), f"two ranks, {key}: {proves}"
