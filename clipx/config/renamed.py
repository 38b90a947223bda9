"""Renamed and removed keys.

Overrides with an old name are rejected with the new name or the reason. Saved configurations are read under the new
names, without the removed keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

# Old key -> new key, both relative to their group, as `group_key` returns them. Only the last part may differ.
RENAMED = {
    "model.image.squash": "model.image.stretch",
    "evaluator.own": "evaluator.held_out",
    "evaluator.repeated": "evaluator.duplicate_captions",
    "checkpoint.fail_after": "checkpoint.max_failures",
    "distributed.gathered": "distributed.param_dtype",
    "distributed.reduced": "distributed.reduce_dtype",
    "zero": "base",  # of clipx.wise_ft, as are the next two
    "fine": "finetuned",
    "choose": "select",
    "samples_per_part": "samples_per_shard",  # of clipx.score
    "train_run": "of",  # of clipx.bench loader
    "launcher.tasks": "launcher.tasks_per_node",
    "launcher.parallelism": "launcher.array_parallelism",  # of clipx_slurm, as the next four
    "launcher.signal_before_s": "launcher.signal_delay_s",
    "launcher.max_requeue": "launcher.max_num_timeout",
    "launcher.sbatch": "launcher.additional_parameters",
    "launcher.srun": "launcher.srun_args",
}


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed key."""

    sibling: str
    """A field of the specs that had the key, or several, separated by spaces. Others of the same group may still have
    the key."""

    equivalent: object
    """Value of the key with which these specs now behave as before. A saved run with another one cannot resume."""

    reason: str
    """Reason for the message."""


_SAMPLER = "it is an argument of Optuna's sampler, hydra.sweeper.sampler_args"
_PRUNER = "it is an argument of Optuna's pruner, hydra.sweeper.pruner_args"

# Key, relative to its group -> what replaces it.
REMOVED = {
    "model.image.native": Removed(
        sibling="features",
        equivalent=False,
        reason="a kind of model keeps the aspect ratio of images: choose model=naflex_tiny or "
        "model=vit_b16_siglip2_naflex",
    ),
    "model.image.max_tokens": Removed(
        sibling="features", equivalent=256, reason="only a model that keeps the aspect ratio of images has it"
    ),
    "teacher.micro_batches": Removed(
        sibling="embeddings", equivalent=None, reason="a teacher has the micro-batches of the run, data.micro_batches"
    ),
    "evaluator.max_iterations": Removed(
        sibling="validation_share", equivalent=1000, reason="a fit has at most 1,000 iterations"
    ),
    "data.samples_per_shard": Removed(
        sibling="held_out_split",
        equivalent=None,
        reason="data=webdataset data.shards=hf://… has it, for tars that nothing counts",
    ),
    "objective.tau_gradient": Removed(
        sibling="feature_gradient",
        equivalent="exact",
        reason="FastCLIP's published code takes the exact step too, Adam's; objective.feature_gradient=official alone "
        "gives its gradients",
    ),
    # of clipx.embed, score, prepare and index
    "retry_s": Removed("samples_per_shard label_key", 120.0, "failed requests are repeated for 120 s, as in training"),
    # of clipx.caption and clipx.prepare
    "max_pixels": Removed("images only_shrink", 89_000_000, "images of more than 89,000,000 pixels are bad ones"),
    "max_bad_share": Removed("images", 0.1, "the captions of all good images are printed in any case"),
    "out": Removed("images", None, "captions are printed on standard output: write > FILE at the end of the command"),
    # of clipx.look and clipx.score
    "near_bits": Removed("data", 4, "hashes of near duplicates differ in at most 4 of 64 bits"),
    "sheet": Removed("samples", 48, "the contact sheet has 48 samples"),
    "seed": Removed("views", None, "the crops of clipx.embed are those of seed 0, equal for all models"),
    "held_out_share": Removed("manifest", 0.05, "the index does not depend on it"),
    # of clipx.plan
    "published": Removed("price_per_gpu_hour", False, "plan a published setting by its experiment or its options"),
    "reserve_gb": Removed("price_per_gpu_hour", 4.0, "the reserve is 4 GB: lower device_memory_gb for a larger one"),
    "loss_tflops": Removed("price_per_gpu_hour", None, "the loss is assumed to reach 45 % of the peak in float32"),
    "measured": Removed("price_per_gpu_hour", None, "give mfu: that of the benchmark, or train/mfu of a run"),
    "bytes_per_sample": Removed("price_per_gpu_hour", 25e3, "the rate of storage is that of 25,000 bytes per sample"),
    "logger.group": Removed("project", None, "choose logger.trackio.project; WANDB_RUN_GROUP is for Weights & Biases"),
    "logger.notes": Removed("entity", None, "set the environment variable WANDB_NOTES"),
    "logger.tags": Removed("tracking_uri", {}, "choose logger.mlflow.experiment, or tag the run in MLflow"),
    "launcher.network": Removed(
        sibling="environment",
        equivalent=None,
        reason="NCCL, gloo and torch read environment variables, hydra.launcher.environment.NAME=…: NCCL_SOCKET_IFNAME "
        "and GLOO_SOCKET_IFNAME for interface, NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_P2P_DISABLE, NCCL_ALGO, NCCL_PROTO, "
        "NCCL_DEBUG, TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_FR_BUFFER_SIZE",
    ),
    "launcher.snapshot": Removed("environment", True, "the launchers always copy the code"),
    "launcher.style": Removed(
        "srun_args", "srun", "srun starts the ranks; clipx-sweep script torchrun prints a script"
    ),
    "launcher.time": Removed(
        "timeout_min", None, "hydra.launcher.timeout_min is the time limit in minutes: 1440 for 24h"
    ),
    "launcher.submit": Removed("dry_run", True, "clipx-sweep script prints the script for sbatch"),
    "sweeper.jobs": Removed(
        "sampler_args", None, "the launcher runs parallelism (clipx_slurm: array_parallelism) trials together"
    ),
    "sweeper.storage": Removed("sampler_args", "journal", "the study is study.journal in the sweep's folder"),
    "sweeper.seed": Removed("sampler_args", 0, f"{_SAMPLER}={{seed:0}}"),
    "sweeper.startup_trials": Removed("sampler_args", 10, f"{_SAMPLER}={{n_startup_trials:10}}"),
    "sweeper.pruner_startup_trials": Removed("pruner_args", 5, f"{_PRUNER}={{n_startup_trials:5}}"),
    "sweeper.warmup": Removed("pruner_args", 0, f"{_PRUNER}={{n_warmup_steps:1}}, or min_resource"),
    "sweeper.patience": Removed("pruner_args", 1, f"{_PRUNER}={{patience:1}}"),
    "sweeper.reduction": Removed("pruner_args", 3, f"{_PRUNER}={{reduction_factor:3}}"),
    "sweeper.lower": Removed("pruner_args", None, f"{_PRUNER}={{lower:0.1}}"),
    "sweeper.upper": Removed("pruner_args", None, f"{_PRUNER}={{upper:5}}"),
}


def group_key(key: str) -> str:
    """Returns a key relative to its group: without the names of nested options and without indices.

    `evaluator.mine.every` is `evaluator.every`, `data.sources.cc.path` and `evaluator.mine.sets.birds.path` are
    `data.path`, `hydra.launcher.nodes` is `launcher.nodes`, and `stages[0].until` is `stages.until`.
    """
    key = key.removeprefix("hydra.")
    key = re.sub(r"^(data|evaluator\.[^.]+\.sets\.[^.]+)(\.sources\.[^.]+)*(?=\.|$)", "data", key)
    return re.sub(r"^(evaluator|logger)\.[^.]+\.|\[\d+\]", lambda found: f"{found[1]}." if found[1] else "", key)


def current_name(key: str, names: Collection[str]) -> str | None:
    """Returns the current name of a renamed field. None: it was not renamed. `key`: relative to its group.

    `names`: the fields of its spec. A plug-in's spec may have a field with the old name, which is not translated.
    """
    new = RENAMED.get(key, "").rpartition(".")[2]
    return new if new in names and key.rpartition(".")[2] not in names else None


def removed(key: str, names: Collection[str]) -> Removed | None:
    """Returns the entry of a removed field. None: it was not removed. `key`: relative to its group.

    `names`: the fields of its spec.
    """
    found = REMOVED.get(key)
    return found if found and {*found.sibling.split()} & {*names} and key.rpartition(".")[2] not in names else None
