"""Flags of open_clip's trainer (open_clip_train.params of open_clip 3.3), and what to write instead.

The command line answers a flag by this table. A test compares it with the parser of the installed open_clip.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Overrides that replace a flag. Empty: there is no counterpart, and `note` has the reason."""

    overrides: str
    note: str = ""

    @property
    def answer(self) -> str:
        """Text for an error message: what to write."""
        if not self.overrides:
            return f"it has no counterpart here, {self.note}: remove it"
        return f"write {self.overrides}" + (f" ({self.note})" if self.note else "")


_GLOBAL = "the batch of all ranks together: --batch-size x --accum-freq x ranks"
_ALL_WITH_LOSS = "because each rank computes only its rows of the loss, with the exact gradient of all ranks"
_BLOCKS = "the number of highest blocks that are trained: one less, because open_clip's own towers count the projection"
_CACHE = "because HF_HOME and CLIPX_CACHE set the folders"

FLAGS: dict[str, Counterpart] = {
    # data
    "train-data": Counterpart("data=webdataset data.shards='…'", "or data=csv data.path=…"),
    "train-data-upsampling-factors": Counterpart(
        "data=mixture +data@data.sources.NAME=webdataset data.sources.NAME.weight=…", "shares of each batch"
    ),
    "val-data": Counterpart("data.held_out_shards='…'", "or data.held_out_path=… of data=csv"),
    "train-num-samples": Counterpart("data.samples=…", "reported only: the samples are counted"),
    "val-num-samples": Counterpart("", "because the samples are counted"),
    "dataset-type": Counterpart("data=…", "webdataset, csv, folder or shapes (synthetic)"),
    "dataset-resampled": Counterpart("data.replacement=true"),
    "csv-separator": Counterpart("data.separator=…"),
    "csv-img-key": Counterpart("data.image_column=…"),
    "csv-caption-key": Counterpart("data.caption_column=…"),
    "imagenet-val": Counterpart(
        "evaluator=[zeroshot] evaluator.zeroshot.classnames=imagenet +data@evaluator.zeroshot.sets.imagenet=folder "
        "evaluator.zeroshot.sets.imagenet.path=…"
    ),
    "imagenet-v2": Counterpart(
        "evaluator=[zeroshot] evaluator.zeroshot.classnames=imagenet +data@evaluator.zeroshot.sets.v2=folder "
        "evaluator.zeroshot.sets.v2.path=…"
    ),
    "workers": Counterpart("data.workers=…", "for each rank"),
    "batch-size": Counterpart("data.batch_size=…", _GLOBAL),
    "aug-cfg": Counterpart("data.crop_scale=[0.9,1.0]", "and data.crop_ratio, data.augment"),
    # model
    "model": Counterpart("model=…", "ViT-B-32 is vit_b32, RN50 is rn50"),
    "pretrained": Counterpart("model.weights=…", "a file, a folder, a URL or hf-hub:ORG/NAME"),
    "pretrained-image": Counterpart("model.image.weights=timm", "the weights of timm"),
    "lock-image": Counterpart("model.image.lock=all"),
    "lock-image-unlocked-groups": Counterpart("model.image.lock=N", _BLOCKS),
    "lock-image-freeze-bn-stats": Counterpart("model.image.lock_norms=true", "the default"),
    "lock-text": Counterpart("model.text.lock=all"),
    "lock-text-unlocked-layers": Counterpart("model.text.lock=N", _BLOCKS),
    "lock-text-freeze-layer-norm": Counterpart("model.text.lock_norms=true", "the default"),
    "image-mean": Counterpart("model.image.mean=[…,…,…]"),
    "image-std": Counterpart("model.image.std=[…,…,…]"),
    "image-interpolation": Counterpart("model.image.interpolation=bilinear", "bicubic is the default"),
    "image-resize-mode": Counterpart("model.image.stretch=true", "for squash; shortest is the default"),
    "grad-checkpointing": Counterpart("model.image.checkpointing=1 model.text.checkpointing=1", "every block"),
    "force-context-length": Counterpart("model.text.context_length=…"),
    "force-image-size": Counterpart("model.image.size=…"),
    "force-quick-gelu": Counterpart("model.quick_gelu=true", "or model=vit_b32_quickgelu"),
    "force-patch-dropout": Counterpart("model.patch_dropout=…"),
    "force-custom-text": Counterpart("", "because every text tower is a module of its own"),
    "torchscript": Counterpart("", "because torch.compile replaces it: compile.towers=true"),
    "torchcompile": Counterpart("compile.towers=true", "the default on CUDA"),
    "trace": Counterpart("", "because torch.compile replaces it: compile.towers=true"),
    "use-bnb-linear": Counterpart("precision=int8"),
    "cache-dir": Counterpart("", _CACHE),
    # loss
    "local-loss": Counterpart("", _ALL_WITH_LOSS),
    "gather-with-grad": Counterpart("", _ALL_WITH_LOSS),
    "loss-dist-impl": Counterpart("", _ALL_WITH_LOSS),
    "siglip": Counterpart("objective=siglip model=vit_b16_siglip"),
    "coca-caption-loss-weight": Counterpart("objective=coca objective.caption_weight=…"),
    "coca-contrastive-loss-weight": Counterpart("objective=coca objective.contrastive_weight=…"),
    "distill-model": Counterpart("objective=distillation teacher.weights=…"),
    "distill-pretrained": Counterpart("objective=distillation teacher.weights=…"),
    # optimization
    "accum-freq": Counterpart("data.micro_batches=…", "data.batch_size is divided by it, not multiplied"),
    "epochs": Counterpart("duration=32ep"),
    "epochs-cooldown": Counterpart("schedule=constant_cooldown schedule.cooldown=4ep"),
    "lr": Counterpart("optimizer.lr=…"),
    "beta1": Counterpart("optimizer.betas=[0.9,0.98]"),
    "beta2": Counterpart("optimizer.betas=[0.9,0.98]"),
    "eps": Counterpart("optimizer.eps=…"),
    "wd": Counterpart("optimizer.weight_decay=…"),
    "momentum": Counterpart("optimizer=sgd optimizer.momentum=…"),
    "opt": Counterpart("optimizer=…", "adamw, lamb, lion, muon or sgd"),
    "warmup": Counterpart("schedule.warmup=10000st"),
    "skip-scheduler": Counterpart("schedule=constant schedule.warmup=0st"),
    "lr-scheduler": Counterpart("schedule=…", "cosine, constant or constant_cooldown"),
    "lr-cooldown-end": Counterpart("schedule=constant_cooldown schedule.min_lr=…"),
    "lr-cooldown-power": Counterpart("schedule=constant_cooldown schedule.power=…"),
    "grad-clip-norm": Counterpart("optimizer.clip_norm=…"),
    "precision": Counterpart("precision=…", "amp is amp_fp16, pure_bf16 is bf16, pure_fp16 is fp16"),
    "seed": Counterpart("seed=…"),
    # processes
    "device": Counterpart("distributed.device=…"),
    "dist-url": Counterpart("", "because MASTER_ADDR and MASTER_PORT name the rendezvous"),
    "dist-backend": Counterpart("distributed.backend=…"),
    "horovod": Counterpart("", "because torchrun, srun or mpirun start the ranks"),
    "use-bn-sync": Counterpart("distributed.sync_batchnorm=true"),
    "ddp-static-graph": Counterpart("distributed.static_graph=true"),
    "no-set-device-rank": Counterpart("", "because a single visible device is found"),
    # run
    "name": Counterpart("name=…"),
    "logs": Counterpart("run_dir=…", "outputs/NAME by default"),
    "log-local": Counterpart("", "because rank 0 logs for all ranks"),
    "log-every-n-steps": Counterpart("log_every=100st"),
    "report-to": Counterpart("logger=[tensorboard,wandb]", "also mlflow and trackio"),
    "wandb-notes": Counterpart("logger=[wandb] logger.wandb.notes='…'"),
    "wandb-project-name": Counterpart("logger=[wandb] logger.wandb.project=…"),
    "debug": Counterpart("", "because events.jsonl and HYDRA_FULL_ERROR=1 have the details"),
    "copy-codebase": Counterpart("", "because the launchers of clipx-sweep run a snapshot of the code"),
    "resume": Counterpart("resume=auto", "or latest, step:N, a run directory, or open_clip's epoch_N.pt"),
    "save-frequency": Counterpart("checkpoint.every=1ep checkpoint.keep_every=1ep"),
    "save-most-recent": Counterpart("checkpoint.keep_last=1"),
    "delete-previous-checkpoint": Counterpart("checkpoint.keep_last=1"),
    "zeroshot-frequency": Counterpart("evaluator.zeroshot.every=2ep"),
    "val-frequency": Counterpart("evaluator.retrieval.every=1ep"),
    "remote-sync": Counterpart("checkpoint.remote=s3://…"),
    "remote-sync-frequency": Counterpart("checkpoint.every=30min", "each checkpoint is uploaded"),
    "remote-sync-protocol": Counterpart("checkpoint.remote=s3://…", "the protocol is a part of the URL"),
}
