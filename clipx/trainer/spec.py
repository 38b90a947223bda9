"""RunSpec: the complete configuration of a run, checked as a whole."""

from __future__ import annotations

import typing
from dataclasses import field
from pathlib import Path

from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.config.compose import checked, compose_config, prepare
from clipx.config.duration import Duration, a_duration
from clipx.config.grammar import hydra_override
from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.config.names import check_metric_part, check_name, check_text
from clipx.config.options import option
from clipx.config.registry import MISSING, complete, frozen, register
from clipx.data.spec import DataSpec, require_multiple
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError
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
from clipx.trainer.rules import check_run
from clipx.trainer.stages import StageSpec


def parse_duration(text: str) -> Duration:
    """Parses `duration=` of a run. Raises ConfigError."""
    return Duration.parse(text, "duration")


@register("")
@frozen
class RunSpec:
    """One training run: groups of options, and options of the run itself."""

    kind: str = "run"
    """Type of the configuration; always run."""

    name: str = option(MISSING, check=check_name)
    """Name of the run in reports and loggers, and the last part of the default run_dir: at most 200 bytes, not empty,
    without / and control characters. By default MODEL-DATA-DATE-TIME."""

    run_dir: str = option(MISSING, check=check_text)
    """Run directory, a path into which the run writes everything. By default outputs/NAME. resume=DIRECTORY
    replaces it: a run resumes in its run directory."""

    seed: int = option(0, ge=0, lt=2**63, hint="give 0 or more")
    """Seed of all random numbers: initial weights, order of samples, augmentation, dropout."""

    deterministic: bool = False
    """Uses deterministic algorithms only: a run on CUDA then repeats and resumes bit for bit on the same device, torch
    and number of ranks, as it does on the CPU anyway. Expect slower attention and convolutions. An operation without a
    deterministic algorithm is an error, and so is compile.mode=max_autotune, which selects kernels by their time."""

    duration: str = option("32ep", check=a_duration())
    """Length of training: 32ep (epochs), 10000st (optimizer steps) or 12.8e9sa (samples). At least one step."""

    resume: str = option("none", check=check_text)
    """Start of the run. none: a new run. auto: resume if run_dir holds a run, else a new run. latest: resume the run in
    run_dir, an error if there is none. step:N: the same from the checkpoint of step N. A run directory or one of its
    checkpoints: resume with the saved configuration, which other overrides change; as a path in that directory, as a
    URL after a download to run_dir. A .pt file of open_clip's trainer: a new run that continues that training."""

    log_every: str = option("20st", check=a_duration())
    """Interval at which metrics are read from the device and logged: a duration such as 20st (optimizer steps), 1e6sa
    (samples) or 0.1ep (epochs)."""

    evaluate: bool = True
    """Whether the evaluators run during training, each at its interval. false: none of them; `python -m clipx.evaluate
    run=…` runs them later."""

    report: bool = True
    """true: write report.html and draw report.png when the run ends, which takes about a second. Set it to false in
    a sweep of many short runs."""

    max_final_loss: float | None = option(None, gt=0)
    """Largest train/loss at the end of the run: a run that ends above it fails with exit code 1. Needs an
    objective whose loss has the minimum 0. null: no limit."""

    device_peak_tflops: float | None = option(None, gt=0, unit="TFLOP/s", hint="989 of an H100 in bfloat16")
    """Peak TFLOP/s of one device, the reference of the metric train/mfu (model FLOPs utilization), e.g. 989 for an H100
    in bfloat16. null: the value of the device's data sheet; without train/mfu for an unknown device."""

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
        for group, options in (("evaluator", self.evaluator), ("logger", self.logger)):
            for name in options:
                check_metric_part(f"{group}.{name}", name)
        check_run(self)

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

    @property
    def batch_settings(self) -> list[tuple[str, int, int | None]]:
        """Group and value of the batch size, and the image size, of each stage, or of the run; None: the model's."""
        size = self.data.batch_size
        return [
            (f"stages.{i}" if stage.batch_size else "data", stage.batch_size or size, stage.image_size)
            for i, stage in enumerate(self.stages or [StageSpec()])
        ]

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError if so many ranks cannot share the batch of the run, or of a stage, evenly."""
        self.data.check_ranks(ranks)
        parts = ranks * self.data.micro_batches
        for i, stage in enumerate(self.stages):
            require_multiple(f"stages.{i}.batch_size", stage.batch_size or parts, parts, self.data.split_over(ranks))

    @property
    def compares_captions(self) -> bool:
        """True if the objective needs the digests of the captions of a batch."""
        return self.objective.compares_captions(self.data)


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
