"""RunSpec: everything a run is, checked as a whole. Importing this registers every option's schema."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose as hydra_compose

import clipx.checkpoint.spec
import clipx.distributed.spec
import clipx.optimizer.spec
import clipx.precision.spec  # noqa: F401  # registers its options
from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.config.compose import checked, isolated_hydra, prepare, quote_pattern
from clipx.config.duration import Duration, Length
from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.config.registry import MISSING, option
from clipx.data.spec import DataSpec
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError, require
from clipx.evaluator.spec import EvaluatorSpec
from clipx.logger import LoggerSpec
from clipx.model.spec import ModelSpec
from clipx.objective.spec import ObjectiveSpec
from clipx.optimizer.spec import OptimizerSpec
from clipx.precision.spec import PrecisionSpec
from clipx.schedule import ScheduleSpec
from clipx.teacher.spec import TeacherSpec
from clipx.trainer.compile import CompileSpec
from clipx.trainer.profiler import ProfilerSpec
from clipx.trainer.stages import StageSpec, check_stages


@option("")
@dataclass(kw_only=True, slots=True)
class RunSpec:
    """One training run. Each group is one part of it; the rest is what people type most."""

    kind: str = "run"
    name: str = MISSING
    run_dir: str = MISSING  # everything the run writes is in here
    seed: int = 0
    duration: str = "32ep"  # 32ep (epochs), 10000st (optimizer steps), 12.8e9sa (samples)
    resume: str = "none"  # none: a new run; auto: go on in run_dir if it holds a run; latest: it must; step:N: at that
    # checkpoint; or a run directory, or one of its checkpoints, by path or by URL; or a .pt file of open_clip's
    # trainer, from which a new run goes on
    log_every: str = "20st"  # a duration: how often metrics are read from the device and written
    report: bool = True
    """Whether a finished run draws report.png and writes report.html, which takes about a second."""

    device_peak_tflops: float | None = None  # of a device, by which train/mfu goes; null: its data sheet's, where known
    profiler: ProfilerSpec = field(default_factory=ProfilerSpec)
    stages: list[StageSpec] = field(default_factory=list)  # spans that train unlike each other, in their order

    model: ModelSpec = MISSING
    data: DataSpec = MISSING
    objective: ObjectiveSpec = MISSING
    optimizer: OptimizerSpec = MISSING
    schedule: ScheduleSpec = MISSING
    precision: PrecisionSpec = MISSING
    distributed: DistributedSpec = MISSING
    checkpoint: CheckpointSpec = MISSING
    compile: CompileSpec = field(default_factory=CompileSpec)
    teacher: TeacherSpec = field(default_factory=TeacherSpec)
    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)
    logger: dict[str, LoggerSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_dir = Resume.parse(self.resume).run_dir or self.run_dir  # a run is resumed in its own directory
        self._check_own_keys()
        self._check_objective()
        self._check_groups()

    def _check_own_keys(self) -> None:
        """The keys of no group, and what they say of the groups."""
        for key, text in (("name", self.name), ("resume", self.resume), ("run_dir", self.run_dir)):
            require(bool(text), f"{key}= is empty: give a value, or leave it out")
        require(0 <= self.seed < 2**63, f"seed={self.seed} must lie in [0, 2^63): give 0 or more")
        require(
            Resume.parse(self.resume).open_clip is None or self.model.weights is None,
            f"model.weights={self.model.weights} has no effect with resume={self.resume}, which has weights of its "
            "own: leave one of them out",
        )
        total = Duration.parse(self.duration, "duration")
        require(total.value > 0, f"duration={self.duration} is no training at all: give a duration above zero")
        log_every = Duration.parse(self.log_every, "log_every")
        require(log_every.value > 0, f"log_every={self.log_every} must be above zero: 1st logs every step")
        peak = self.device_peak_tflops
        require(peak is None or peak > 0, f"device_peak_tflops={peak} must be above 0, e.g. 989 of an H100 in bfloat16")
        require(
            self.data.weight == 1.0,
            f"data.weight={self.data.weight:g} has no effect: it is of a mixture's sources, data.sources.NAME.weight",
        )
        # An epoch's samples are counted when the data is opened.
        self.schedule.check_fits(self.duration, Length(0, self.data.batch_size))
        self.schedule.check(self.optimizer.lr)

    def _check_objective(self) -> None:
        """What the objective needs of the data and of the model."""
        require(
            self.data.indexed or not self.objective.indexed,
            f"objective={self.objective.kind} keeps state for each sample, but data={self.data.kind} gives samples no "
            "numbers: choose data that does, or objective=infonce",
        )
        require(
            self.model.captions or not self.objective.captions,
            f"objective={self.objective.kind} needs a model that captions, which model={self.model.name} does not: "
            "choose model=coca_vit_b32, or objective=infonce",
        )
        require(
            self.objective.captions or not self.model.captions,
            f"objective={self.objective.kind} has no use for the captions of model={self.model.name}, whose decoder "
            "would learn nothing: choose objective=coca, or model=vit_b32",
        )
        self.model.check_fits(self.duration, Length(0, self.data.batch_size))
        require(
            self.objective.reads_text or self.model.text.frozen,
            f"objective={self.objective.kind} gives the text tower no gradient: add model.text.lock=all, and "
            "weights to begin with by model.weights=…",
        )
        self.model.check_freezing(
            self.objective.has_head or self.model.captions,
            {"image": self.optimizer.image_lr_scale, "text": self.optimizer.text_lr_scale},
        )

    def _check_groups(self) -> None:
        """Rules between all other groups."""
        check_stages(self.stages, self.model, self.data, self.duration)
        for batch in {self.data.batch_size} | {stage.batch_size or self.data.batch_size for stage in self.stages}:
            self.objective.check(batch, self.data.published)
        self.teacher.check(self.objective.kind, self.objective.taught, self.data.kind, self.data.indexed)
        self.distributed.check_micro_batches(self.data.micro_batches)
        self.distributed.check_optimizer(self.optimizer.kind, self.optimizer.shardable)
        self.precision.check(self.optimizer.ema_decay, self.distributed.shards_parameters)
        self.compile.check(self.objective, self.optimizer)
        best = self.checkpoint.best
        numbers = [f"eval/{name}/" for name, evaluator in self.evaluator.items() if evaluator.every != "none"]
        numbers += ["eval/head/"] if numbers and self.objective.has_head else []
        require(
            best is None or best.startswith(tuple(numbers)),
            f"checkpoint.best={best} is no number of an evaluator of this run: give one of "
            f"{', '.join(f'{number}…' for number in numbers) or 'them; evaluator=[] leaves none'}, or null",
        )


def compose(*overrides: str, config_name: str = "train", config_dir: str | Path | None = None) -> RunSpec:
    """Composes and checks a run from Python or a notebook.

    `overrides` are what one types on the command line (`"model=vit_b32"`, `"data.batch_size=512"`); `config_dir`
    is a folder with groups of one's own. Raises ConfigError, one line naming value, rule and fix.
    """
    overrides = tuple(map(quote_pattern, overrides))
    folders = [Path(config_dir).absolute()] if config_dir else []
    searchpath = [f"hydra.searchpath={[str(folder) for folder in folders]}"]
    try:
        prepare(overrides, folders)
        with isolated_hydra():
            return typing.cast("RunSpec", checked(hydra_compose(config_name, [*overrides, *searchpath])))
    except COMPOSITION_ERRORS as error:
        raise ConfigError(one_line(error)) from error
