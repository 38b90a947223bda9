"""RunSpec: the complete configuration of a run, checked as a whole."""

from __future__ import annotations

import typing
from dataclasses import field
from pathlib import Path

from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.config.compose import checked, compose_config, prepare
from clipx.config.duration import Duration, Length
from clipx.config.grammar import hydra_override
from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.config.names import check_metric_part, check_name
from clipx.config.registry import MISSING, complete, frozen, kinds, register
from clipx.data.spec import DataSpec, non_default_values
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError, require
from clipx.escape import escaped
from clipx.evaluator.spec import EvaluatorSpec
from clipx.logger import LoggerSpec
from clipx.model.spec import ModelSpec
from clipx.objective.spec import ObjectiveSpec
from clipx.optimizer.spec import OptimizerSpec
from clipx.precision.spec import PrecisionSpec
from clipx.schedule import ScheduleSpec
from clipx.teacher.spec import TeacherSpec
from clipx.trainer.compile import CompileSpec
from clipx.trainer.continued import composition_base
from clipx.trainer.early_stopping import EarlyStoppingSpec
from clipx.trainer.profiler import ProfilerSpec
from clipx.trainer.stages import StageSpec, batch_settings, check_ranks, check_stages


def parse_duration(text: str) -> Duration:
    """Parses `duration=` of a run. Raises ConfigError."""
    return Duration.parse(text, "duration")


@register("")
@frozen
class RunSpec:
    """One training run: groups of options, and options of the run itself."""

    kind: str = "run"
    """Type of the configuration; always run."""

    name: str = MISSING
    """Name of the run in reports and loggers, and the last part of the default run_dir: at most 200 bytes, not empty,
    without / and control characters. By default MODEL-DATA-DATE-TIME."""

    run_dir: str = MISSING
    """Run directory, a path into which the run writes everything. Not empty. By default outputs/NAME. resume=DIRECTORY
    replaces it: a run resumes in its run directory."""

    seed: int = 0
    """Seed of all random numbers: initial weights, order of samples, augmentation, dropout. In [0, 2^63)."""

    deterministic: bool = False
    """Uses deterministic algorithms only: a run on CUDA then repeats and resumes bit for bit on the same device, torch
    and number of ranks, as it does on the CPU anyway. Expect slower attention and convolutions. An operation without a
    deterministic algorithm is an error, and so is compile.mode=max_autotune, which selects kernels by their time."""

    duration: str = "32ep"
    """Length of training: 32ep (epochs), 10000st (optimizer steps) or 12.8e9sa (samples). Above zero, and at least one
    step."""

    resume: str = "none"
    """Start of the run. none: a new run. auto: resume if run_dir holds a run, else a new run. latest: resume the run in
    run_dir, an error if there is none. step:N: the same from the checkpoint of step N. A run directory or one of its
    checkpoints: resume with the saved configuration, which other overrides change; as a path in that directory, as a
    URL after a download to run_dir. A .pt file of open_clip's trainer: a new run that continues that training."""

    log_every: str = "20st"
    """Interval at which metrics are read from the device and logged: a duration above zero, such as 20st (optimizer
    steps), 1e6sa (samples) or 0.1ep (epochs)."""

    evaluate: bool = True
    """Whether the evaluators run during training, each at its interval. false: none of them; `python -m clipx.evaluate
    run=…` runs them later."""

    report: bool = True
    """true: write report.html and draw report.png when the run ends, which takes about a second. Set it to false in
    a sweep of many short runs."""

    max_final_loss: float | None = None
    """Largest train/loss at the end of the run, above 0: a run that ends above it fails with exit code 1. Needs an
    objective whose loss has the minimum 0. null: no limit."""

    device_peak_tflops: float | None = None
    """Peak TFLOP/s of one device, the reference of the metric train/mfu (model FLOPs utilization). Above 0, e.g. 989
    for an H100 in bfloat16. null: the value of the device's data sheet; without train/mfu for an unknown device."""

    profiler: ProfilerSpec = field(default_factory=ProfilerSpec)
    """Profiler: a torch.profiler trace of a few steps."""

    early_stopping: EarlyStoppingSpec = field(default_factory=EarlyStoppingSpec)
    """Early stopping: ends the run when a metric has stopped improving."""

    stages: list[StageSpec] = field(default_factory=list)
    """Stages: consecutive spans of the run with different image size, batch size, learning rate or patch dropout. At
    least two, in order. []: the same settings in the whole run."""

    model: ModelSpec = MISSING
    """Model: image and text tower, tokenizer, initial weights, frozen layers and patch dropout."""

    data: DataSpec = MISSING
    """Data: training and held-out samples, batch size, order of samples, augmentation and loader processes."""

    objective: ObjectiveSpec = MISSING
    """Objective: the loss of the embeddings, with its temperature, bias and per-sample state."""

    optimizer: OptimizerSpec = MISSING
    """Optimizer: update rule, peak learning rate, weight decay, gradient clipping, non-finite steps and the moving
    average of the weights."""

    schedule: ScheduleSpec = MISSING
    """Schedule of the learning rate: warm-up, then its course to the end of the run."""

    precision: PrecisionSpec = MISSING
    """Precision: number formats of weights and computation, such as fp32, bf16 and mixed precision; loss scaling."""

    distributed: DistributedSpec = MISSING
    """Distribution: device, process group, time limits, and data parallelism with whole (ddp) or sharded (fsdp)
    parameters."""

    checkpoint: CheckpointSpec = MISSING
    """Checkpoints: interval, retention, and upload to remote storage."""

    compile: CompileSpec = field(default_factory=CompileSpec)
    """Compilation by torch.compile of the towers' blocks, the loss and the optimizer's step. By default the
    towers are compiled on CUDA."""

    teacher: TeacherSpec = field(default_factory=TeacherSpec)
    """Teacher of objective=distillation, or reference of drrho_clip: a model, or stored embeddings."""

    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)
    """Evaluators by name: zero-shot classification, retrieval and linear probe, each at its interval. Chosen by a list,
    e.g. evaluator=[zeroshot,retrieval]; []: no evaluation."""

    logger: dict[str, LoggerSpec] = field(default_factory=dict)
    """Loggers by name, in addition to metrics.jsonl, which every run writes. Chosen by a list, e.g.
    logger=[tensorboard,wandb]; []: metrics.jsonl alone."""

    def __post_init__(self) -> None:
        complete(self, run_dir=self.resume_point.run_dir or self.run_dir)  # a run resumes in its run directory
        self._check_own_keys()
        self._check_objective()
        self._check_groups()

    @property
    def whole(self) -> Duration:
        """The parsed `duration`."""
        return parse_duration(self.duration)

    @property
    def log_interval(self) -> Duration:
        """The parsed `log_every`."""
        return Duration.parse(self.log_every, "log_every")

    @property
    def resume_point(self) -> Resume:
        """The parsed `resume`."""
        return Resume.parse(self.resume)

    @property
    def active_evaluators(self) -> dict[str, EvaluatorSpec]:
        """Evaluators that run during training, by name."""
        return {name: e for name, e in self.evaluator.items() if self.evaluate and e.every != "none"}

    def _check_own_keys(self) -> None:
        """Checks the options of the run itself, and their rules with groups. Raises ConfigError."""
        check_name("name", self.name)
        for key, text in (("resume", self.resume), ("run_dir", self.run_dir)):
            require(bool(text), f"{key}= is empty: give a value, or remove it")
            require(escaped(text) == text, f"{key}={escaped(text)} contains an unprintable character: remove it")
        for group, options in (("evaluator", self.evaluator), ("logger", self.logger)):
            for name in options:
                check_metric_part(f"{group}.{name}", name)
        require(0 <= self.seed < 2**63, f"seed={self.seed} must be in [0, 2^63): give 0 or more")
        require(
            self.resume_point.open_clip is None or self.model.weights is None,
            f"model.weights={self.model.weights} has no effect with resume={self.resume}, which contains weights: "
            "remove one of them",
        )
        for tower, location in self.model.tower_weights.items():
            require(
                self.resume_point.open_clip is None,
                f"model.{tower}.weights={location} has no effect with resume={self.resume}, which contains weights: "
                "remove one of them",
            )
        require(self.whole.value > 0, f"duration={self.duration} must be above zero, e.g. 32ep")
        require(self.log_interval.value > 0, f"log_every={self.log_every} must be above zero: 1st logs every step")
        peak = self.device_peak_tflops
        require(peak is None or peak > 0, f"device_peak_tflops={peak} must be above 0, e.g. 989 of an H100 in bfloat16")
        limit = self.max_final_loss
        require(limit is None or limit > 0, f"max_final_loss={limit} must be above 0, e.g. 0.1; null: no limit")
        require(
            self.data.weight == 1.0,
            f"data.weight={self.data.weight:g} has no effect outside a mixture: give data.sources.NAME.weight",
        )
        # 0: the samples of an epoch are counted when the data is opened.
        self.schedule.check_fits(self.whole, Length(0, self.data.batch_size))
        self.schedule.check(self.optimizer.lr)

    def _check_objective(self) -> None:
        """Checks the objective's requirements on data and model. Raises ConfigError."""
        require(
            self.data.indexed or not self.objective.indexed,
            f"objective={self.objective.kind} needs per-sample state, but data={self.data.kind} has no sample indices: "
            "choose data with indices, or objective=infonce",
        )
        if self.objective.reads_trunk:
            self.model.check_trunk(self.objective.kind)
        read, returned = self.objective.outputs, self.model.outputs
        if read not in (None, returned):
            raise ConfigError(
                f"objective={self.objective.kind} reads {read}, which model={self.model.name} does not return: choose "
                f"a model of kind {_with_outputs('model', read)}, or objective=infonce"
            )
        if returned not in (None, read):
            readers = _with_outputs("objective", returned)
            raise ConfigError(
                f"objective={self.objective.kind} does not read the {returned} that model={self.model.name} returns, "
                f"so a part of it is not trained: choose objective={readers}, or model=vit_b32"
            )
        self._check_captions()
        require(
            self.max_final_loss is None or self.objective.has_zero_minimum(self.data),
            f"max_final_loss={self.max_final_loss} has no meaning for objective={self.objective.kind}, whose loss does "
            "not have the minimum 0: add max_final_loss=null, or choose objective=infonce with one right caption",
        )
        require(
            self.objective.reads_text or not self.data.mismatched,
            f"data.mismatched={self.data.mismatched} has no effect on objective={self.objective.kind}, which reads no "
            "captions: remove it",
        )
        for key, value in non_default_values(self.data, ("caption_mask",)):
            require(
                self.objective.reads_text,
                f"data.{key}={value} has no effect on objective={self.objective.kind}, which reads no captions: remove "
                "it",
            )
        self.model.check_fits(self.whole, Length(0, self.data.batch_size))
        self.model.check_stretching()
        require(
            self.objective.reads_text or self.model.text.frozen,
            f"objective={self.objective.kind} gives the text tower no gradient: add model.text.lock=all, and "
            "initial weights with model.weights=… or model.text.weights=…",
        )
        self.model.check_freezing(
            self.objective.has_head or self.model.outputs is not None,
            {"image": self.optimizer.image_lr_scale, "text": self.optimizer.text_lr_scale},
        )

    @property
    def batch_settings(self) -> list[tuple[str, int, int | None]]:
        """The group of the batch size, the batch size and the image size of each stage, or of the run."""
        return [*batch_settings(self.stages, self.data)]

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError if so many ranks cannot share the batch of the run, or of a stage, evenly."""
        check_ranks(self.stages, self.data, ranks)

    @property
    def compares_captions(self) -> bool:
        """True if the objective needs the digests of the captions of a batch."""
        return self.objective.compares_captions(self.data)

    def _check_captions(self) -> None:
        """Checks the options of several captions per sample, equal captions and sub-captions. Raises ConfigError."""
        objective = self.objective
        objective.check_captions(self.data)
        for key, value in self.data.set_options(("sub_captions",)):
            require(
                objective.reads_text,
                f"data.{key}={value} has no effect on objective={objective.kind}, which reads no captions: remove it",
            )
            require(
                not self.teacher.embeddings,
                f"data.{key}={value} draws parts of captions, and teacher.embeddings={self.teacher.embeddings} has the "
                "texts of whole captions: remove one of them, or give teacher.weights",
            )

    def _check_groups(self) -> None:
        """Checks the rules between all other groups. Raises ConfigError."""
        self._check_images()
        check_stages(self.stages, self.model, self.data, self.whole)
        for batch in {batch for _, batch, _ in self.batch_settings}:
            self.objective.check(batch, self.data.published)
        taught, logits = self.objective.taught, self.objective.teacher_logits
        self.teacher.check(self.objective.kind, taught, logits, self.data.kind, self.data.indexed)
        self.distributed.check_micro_batches(self.data.micro_batches)
        self.distributed.check_optimizer(self.optimizer.kind, self.optimizer.shardable)
        self._check_format()
        self.compile.check(self.objective, self.optimizer, self.deterministic)
        if self.checkpoint.best is not None:
            from clipx.evaluator.metric_names import check_metric

            check_metric("checkpoint.best", self.checkpoint.best, self.active_evaluators, self.objective.has_head)
        length = Length(0, self.data.batch_size)
        self.early_stopping.check(self.active_evaluators, self.objective.has_head, self.whole, length)

    def _check_images(self) -> None:
        """Checks that the options of images have an effect on those that the model reads. Raises ConfigError."""
        kind = self.model.image.kind
        kind.check_data(self.data)
        for name, evaluator in self.evaluator.items():
            for key, data in evaluator.sets.items():
                kind.check_data(data, f"evaluator.{name}.sets.{key}")
        for i, stage in enumerate(self.stages):
            sizes = (("image_size", stage.image_size), ("patch_dropout", stage.patch_dropout))
            kind.check_squares([(f"stages.{i}.{key}", value) for key, value in sizes])
        same = "give teacher.embeddings of the same samples"
        kind.check_squares([("teacher.weights", self.teacher.weights)], same)

    def _check_format(self) -> None:
        """Checks the rules between the number format and other groups, also for the one that auto chose: `resolve`
        makes a new spec with it. Raises ConfigError."""
        precision = self.precision
        self.distributed.check_precision(precision.kind, precision.weight_format, precision.autocasts)
        precision.check(self.optimizer.ema_decay, self.distributed.shards_parameters)
        require(
            self.model.image.kind.most_tokens is None or not precision.tunes_shapes,
            f"precision={precision.kind} searches kernels for each number of tokens, for minutes, and "
            f"{self.model.image.kind.option} has tens of them: choose precision=amp_bf16 or float8",
        )
        require(
            not (self.model.has_adapters and precision.converts_layers),
            f"precision={precision.kind} replaces linear layers, which model.image.lora and model.text.lora adapt: "
            "choose precision=amp_bf16, or remove the adapters",
        )


def compose(*overrides: str, config_name: str = "train", config_dir: str | Path | None = None) -> RunSpec:
    """Composes and checks a run from Python or a notebook. Returns its RunSpec.

    `overrides`: overrides as on the command line (`"model=vit_b32"`, `"data.batch_size=512"`). `config_dir`: a folder
    with further groups, as for --config-dir. Raises ConfigError, one line with value, rule and fix, and CheckpointError
    if resume= names no run.
    """
    overrides = tuple(map(hydra_override, overrides))
    folders = [Path(config_dir).absolute()] if config_dir else []
    prepare(overrides, folders)
    try:
        base = composition_base(config_name, overrides, folders)
        return typing.cast("RunSpec", checked(compose_config(base, overrides, folders)))
    except COMPOSITION_ERRORS as error:
        raise ConfigError(one_line(error)) from error


def _with_outputs(group: str, outputs: str | None) -> str:
    """Returns the kinds of a group that return or read these outputs, for an error: imports the modules of all."""
    return " or ".join(name for name, kind in kinds(group).items() if kind.outputs == outputs)
