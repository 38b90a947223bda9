"""Flags of open_clip's trainer (open_clip_train.params of open_clip 3.3), and what to write instead.

`command_line.py` answers a command line by this table. Tests compare it with the parser of the installed open_clip
and with the page docs/migrate/open_clip.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clipx.extra.open_clip import rules
from clipx.extra.open_clip.rules import PLACE, Given, hydra_value

OPTIMIZERS = {f"{prefix}{name}": name for name in ("adamw", "lamb", "lion", "muon", "sgd") for prefix in ("", "timm/")}
INTERPOLATIONS = {name: name for name in ("bicubic", "bilinear")}
STRETCH = {"squash": "true", "shortest": "false"}
NONE, ONE, NUMBERS, PAIRS = "none", "one", "numbers", "pairs"  # words that follow a flag


@dataclass(frozen=True, slots=True)
class Flag:
    """Counterpart of a flag."""

    overrides: str | Callable[[Given], list[str]]
    """Overrides, with {} for the value; or a function of all flags, for those that depend on several. Empty: none."""

    reason: str = ""
    """Why there is no counterpart. With choices: what to do for a value that is none."""

    takes: str = ONE
    """Words that follow the flag: NONE, ONE, NUMBERS, or PAIRS, which are key=value."""

    choices: Mapping[str, str] | None = None
    """Text that replaces {}, by the value of the flag. None: the value itself replaces it."""

    def words(self, name: str, given: Given) -> list[str]:
        """Returns the overrides for the flags of a command line, with a note if something has no counterpart."""
        if callable(self.overrides):
            return self.overrides(given)
        if self.choices is not None:
            return given.choose(name, self.overrides, self.choices, self.reason)
        value = f"[{','.join(given.values[name]) or PLACE}]" if self.takes == NUMBERS else hydra_value(given.get(name))
        return [word.replace("{}", value) for word in self.overrides.split()]


_LOSS = "because each rank computes its rows of the loss, with the exact gradient of all ranks"
_COMPILE = "because torch.compile replaces it: compile.towers=true"
_UPLOAD = "because each checkpoint is uploaded when it is complete"
_COUNT = "because samples are counted"

FLAGS: dict[str, Flag] = {
    # data
    "train-data": Flag(rules.data),
    "train-data-upsampling-factors": Flag(rules.data),
    "val-data": Flag(rules.held_out),
    "train-num-samples": Flag("", _COUNT),
    "val-num-samples": Flag("", _COUNT),
    "dataset-type": Flag(rules.data),
    "dataset-resampled": Flag(rules.resampled, takes=NONE),
    "csv-separator": Flag(rules.data),
    "csv-img-key": Flag(rules.data),
    "csv-caption-key": Flag(rules.data),
    "imagenet-val": Flag(rules.evaluation),
    "imagenet-v2": Flag(rules.evaluation),
    "workers": Flag("data.workers={}"),
    "batch-size": Flag(rules.batch),
    "aug-cfg": Flag(rules.augmentation, takes=PAIRS),
    # model
    "model": Flag(rules.model),
    "pretrained": Flag(rules.pretrained),
    "pretrained-image": Flag("model.image.weights=timm", takes=NONE),
    "lock-image": Flag(rules.lock("image", "lock-image-unlocked-groups"), takes=NONE),
    "lock-image-unlocked-groups": Flag(rules.lock("image", "lock-image-unlocked-groups")),
    "lock-image-freeze-bn-stats": Flag("model.image.lock_norms=true", takes=NONE),
    "lock-text": Flag(rules.lock("text", "lock-text-unlocked-layers"), takes=NONE),
    "lock-text-unlocked-layers": Flag(rules.lock("text", "lock-text-unlocked-layers")),
    "lock-text-freeze-layer-norm": Flag("model.text.lock_norms=true", takes=NONE),
    "image-mean": Flag("model.image.mean={}", takes=NUMBERS),
    "image-std": Flag("model.image.std={}", takes=NUMBERS),
    "image-interpolation": Flag("model.image.interpolation={}", choices=INTERPOLATIONS),
    "image-resize-mode": Flag("model.image.stretch={}", choices=STRETCH),
    "grad-checkpointing": Flag("model.image.checkpointing=1 model.text.checkpointing=1", takes=NONE),
    "force-context-length": Flag("model.text.context_length={}"),
    "force-image-size": Flag(rules.image_size, takes=NUMBERS),
    "force-quick-gelu": Flag("model.quick_gelu=true", takes=NONE),
    "force-patch-dropout": Flag("model.patch_dropout={}"),
    "force-custom-text": Flag("", "because every text tower is a module of its own", NONE),
    "torchscript": Flag("", _COMPILE, NONE),
    "torchcompile": Flag("compile.towers=true", takes=NONE),
    "trace": Flag("", _COMPILE, NONE),
    "use-bnb-linear": Flag(rules.precision),
    "cache-dir": Flag("", "because HF_HOME and CLIPX_CACHE set the folders"),
    # loss
    "local-loss": Flag("", _LOSS, NONE),
    "gather-with-grad": Flag("", _LOSS, NONE),
    "loss-dist-impl": Flag("", _LOSS),
    "siglip": Flag("objective=siglip", takes=NONE),
    "coca-caption-loss-weight": Flag("objective=coca objective.caption_weight={}"),
    "coca-contrastive-loss-weight": Flag("objective=coca objective.contrastive_weight={}"),
    "distill-model": Flag(rules.teacher),
    "distill-pretrained": Flag(rules.teacher),
    # optimization
    "accum-freq": Flag(rules.batch),
    "epochs": Flag(rules.duration),
    "epochs-cooldown": Flag(rules.schedule),
    "lr": Flag("optimizer.lr={}"),
    "beta1": Flag(rules.betas),
    "beta2": Flag(rules.betas),
    "eps": Flag("optimizer.eps={}"),
    "wd": Flag("optimizer.weight_decay={} optimizer.decay_rule=published"),
    "momentum": Flag(rules.momentum),
    "opt": Flag("optimizer={}", choices=OPTIMIZERS),
    "warmup": Flag(rules.schedule),
    "skip-scheduler": Flag(rules.schedule, takes=NONE),
    "lr-scheduler": Flag(rules.schedule),
    "lr-cooldown-end": Flag(rules.schedule),
    "lr-cooldown-power": Flag(rules.schedule),
    "grad-clip-norm": Flag("optimizer.clip_norm={}"),
    "precision": Flag(rules.precision),
    "seed": Flag("seed={}"),
    # processes
    "device": Flag("distributed.device={}"),
    "dist-url": Flag("", "because MASTER_ADDR and MASTER_PORT name the rendezvous"),
    "dist-backend": Flag("distributed.backend={}"),
    "horovod": Flag("", "because torchrun, srun or mpirun start the ranks", NONE),
    "use-bn-sync": Flag("distributed.sync_batchnorm=true", takes=NONE),
    "ddp-static-graph": Flag("distributed.static_graph=true", takes=NONE),
    "no-set-device-rank": Flag("", "because a single visible device is found", NONE),
    # run
    "name": Flag("name={}"),
    "logs": Flag(rules.logs),
    "log-local": Flag("", "because rank 0 logs for all ranks", NONE),
    "log-every-n-steps": Flag("log_every={}st"),
    "report-to": Flag(rules.logger),
    "wandb-notes": Flag("", "because WANDB_NOTES sets the notes of the run"),
    "wandb-project-name": Flag(rules.logger),
    "debug": Flag("", "because events.jsonl and HYDRA_FULL_ERROR=1 have the details", NONE),
    "copy-codebase": Flag("", "because the launchers of clipx-sweep run a snapshot of the code", NONE),
    "resume": Flag("resume={}"),
    "save-frequency": Flag(rules.saving),
    "save-most-recent": Flag(rules.saving, takes=NONE),
    "delete-previous-checkpoint": Flag(rules.saving, takes=NONE),
    "zeroshot-frequency": Flag(rules.evaluation),
    "val-frequency": Flag(rules.evaluation),
    "remote-sync": Flag("checkpoint.remote={}"),
    "remote-sync-frequency": Flag("", _UPLOAD),
    "remote-sync-protocol": Flag("", "because the URL names the protocol"),
}
