"""Rules between the groups of a run. Those of a single key are at its field: see `clipx.config.options`.

A rule is a row: what breaks it, the sentence that says so, and overrides that break it, which a test composes. In a
sentence {GROUP.ATTRIBUTE} is of the run, and {found} what `broken` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from clipx.config.duration import Length
from clipx.config.registry import kinds
from clipx.errors import ConfigError, no_effect
from clipx.trainer.compile import CompileMode
from clipx.trainer.stages import check_stages

if TYPE_CHECKING:
    from clipx.model.text_spec import TextTowerSpec
    from clipx.model.tower_spec import ImageTowerSpec
    from clipx.trainer.spec import RunSpec


@dataclass(frozen=True, slots=True)
class GroupRule:
    """A rule that each run keeps."""

    broken: Callable[[Any], Any]
    """Function of the run: what breaks the rule, for the sentence. False, None or empty: nothing."""

    sentence: str
    """Value, rule and fix."""

    example: str
    """Overrides that break it."""


def check_rules(run: RunSpec, rules: Sequence[GroupRule]) -> None:
    """Raises ConfigError for the first of these rules that a run breaks."""
    for rule in rules:
        if found := rule.broken(run):
            values = {field.name: getattr(run, field.name) for field in fields(run)}
            raise ConfigError(rule.sentence.format(found=found, **values))


def check_run(run: RunSpec) -> None:
    """Checks all rules between the groups of a run. Raises ConfigError."""
    check_rules(run, RULES)
    _check_lengths(run)
    for batch in {batch for _, batch, _ in run.batch_settings}:
        run.objective.check(batch, run.data.published)
    run.objective.check_captions(run.data)
    precision, distributed = run.precision, run.distributed  # also of the format that auto chose: see `resolve`
    distributed.check_precision(precision.kind, precision.weight_format, precision.autocasts)
    precision.check(run.optimizer.ema_decay, distributed.shards_parameters)


def _check_lengths(run: RunSpec) -> None:
    """Checks durations against that of the run, as far as they are comparable before the data is opened."""
    length = Length(0, run.data.batch_size)  # 0: the samples of an epoch are counted when the data is opened
    run.schedule.check_fits(run.whole, length)
    run.model.check_fits(run.whole, length)
    check_stages(run.stages, run.model, run.data, run.whole)
    if run.checkpoint.best is not None:
        from clipx.evaluator.metric_names import check_metric

        check_metric("checkpoint.best", run.checkpoint.best, run.active_evaluators, run.objective.has_head)
    run.early_stopping.check(run.active_evaluators, run.objective.has_head, run.whole, length)


# ------------------------------------------------------------------------------------------------- what breaks a rule


def _towers(run: RunSpec) -> Iterator[tuple[str, ImageTowerSpec | TextTowerSpec, bool]]:
    """Yields the name and the options of each tower, and whether it has initial weights."""
    for name, tower in (("image", run.model.image), ("text", run.model.text)):
        yield name, tower, run.model.weights is not None or name in run.model.tower_weights


def _first(found: Iterator[str]) -> str | None:
    return next(found, None)


def _weights_beside_resume(run: RunSpec) -> str | None:
    given = {"model.weights": run.model.weights}
    given |= {f"model.{tower}.weights": location for tower, location in run.model.tower_weights.items()}
    named = (f"{key}={location}" for key, location in given.items() if location is not None)
    return None if run.resume_point.open_clip is None else _first(named)


def _untrained_lock(run: RunSpec) -> str | None:
    return _first(
        f"model.{name}.lock={t.lock}" for name, t, weights in _towers(run) if t.lock != "none" and not weights
    )


def _untrained_adapters(run: RunSpec) -> str | None:
    return _first(
        f"model.{name}.lora.rank={t.lora.rank}" for name, t, weights in _towers(run) if t.lora.rank and not weights
    )


def _nothing_trained(run: RunSpec) -> str | None:
    if run.objective.has_head or run.model.outputs is not None or not all(t.frozen for _, t, _ in _towers(run)):
        return None
    return "lock=all" if run.model.image.has_weights else "projection=none"


def _options_of_images(run: RunSpec) -> str | None:
    """Returns the option of images that has no effect on those that the model reads."""
    kind = run.model.image.kind
    places = {"data": run.data}
    for name, evaluator in run.evaluator.items():
        places |= {f"evaluator.{name}.sets.{key}": data for key, data in evaluator.sets.items()}
    return _first(
        f"{place}.{key}={value}"
        for place, data in places.items()
        for key, value in data.image_options(kind.data_options)
    )


def _options_of_squares(run: RunSpec) -> str | None:
    """Returns the option that needs square images and is set for others."""
    given: dict[str, Any] = {"teacher.weights": run.teacher.weights}
    for i, stage in enumerate(run.stages):
        given |= {f"stages.{i}.image_size": stage.image_size, f"stages.{i}.patch_dropout": stage.patch_dropout or None}
    named = (f"{key}={value}" for key, value in given.items() if value is not None)
    return None if run.model.image.kind.squares else _first(named)


def _unread_outputs(run: RunSpec) -> str | None:
    """Returns the kinds of objective that read the further outputs of the model, if this one does not."""
    returned = run.model.outputs
    return None if returned in (None, run.objective.outputs) else _kinds_with("objective", returned)


def _missing_outputs(run: RunSpec) -> str | None:
    """Returns the kinds of model that return the further outputs that the objective reads, if this one does not."""
    read = run.objective.outputs
    return None if read in (None, run.model.outputs) else _kinds_with("model", read)


def _kinds_with(group: str, outputs: str | None) -> str:
    """Returns the kinds of a group that return or read these outputs: imports the modules of all."""
    return " or ".join(name for name, kind in kinds(group).items() if kind.outputs == outputs)


def _parts_of_captions(run: RunSpec) -> str | None:
    parts = (f"data.{key}={value}" for key, value in run.data.set_options(("sub_captions",)))
    return _first(parts) if run.teacher.embeddings else None


_TRUNK = "objective={objective.kind} trains the pooled features of the image trunk"
_OTHER_MODEL = "choose another model, such as model=vit_b32, or objective=infonce"
_NO_TEXT = "on objective={objective.kind}, which reads no captions"

RULES = (
    GroupRule(
        lambda run: run.data.weight != 1.0,
        no_effect("data.weight={data.weight:g}", "outside a mixture", "give data.sources.NAME.weight"),
        "data.weight=2",
    ),
    GroupRule(
        lambda run: getattr(run.schedule, "min_lr", 0.0) > run.optimizer.lr,
        "schedule.min_lr={schedule.min_lr} is above optimizer.lr={optimizer.lr}: give at most {optimizer.lr}",
        "optimizer.lr=1e-4 schedule.min_lr=1e-3",
    ),
    GroupRule(
        _weights_beside_resume,
        no_effect("{found}", "with resume={resume}, which contains weights", "remove one of them"),
        "resume=epoch_2.pt model.weights=x",
    ),
    # Model and objective.
    GroupRule(
        lambda run: run.objective.indexed and not run.data.indexed,
        "objective={objective.kind} needs per-sample state, but data={data.kind} has no sample indices: choose data "
        "with indices, or objective=infonce",
        "objective=fastclip_v3 data=stream evaluator=[]",
    ),
    GroupRule(
        lambda run: run.objective.reads_trunk and not run.model.has_pooled_trunk,
        f"{_TRUNK}, and model={{model.name}} pools its tokens itself: {_OTHER_MODEL}",
        "objective=superclip model=coca_tiny",
    ),
    GroupRule(
        lambda run: run.objective.reads_trunk and not run.model.image.kind.has_trunk,
        f"{_TRUNK}, and {{model.image.kind.option}}, {{model.image.kind.reason}}, has none: {_OTHER_MODEL}",
        "objective=superclip model=stored_features data=webdataset data.shards=a.tar",
    ),
    GroupRule(
        lambda run: run.objective.reads_trunk and run.model.image.head_blocks,
        f"{_TRUNK}, and model.image.head_blocks={{found}} does not pool them: remove it, or choose objective=infonce",
        "objective=superclip model.image.head_blocks=1",
    ),
    GroupRule(
        lambda run: run.objective.reads_trunk and run.model.image.frozen,
        f"{_TRUNK}, which model.image.lock=all freezes: lock fewer blocks, or choose objective=infonce",
        "objective=superclip model.image.lock=all model.weights=w",
    ),
    GroupRule(
        _missing_outputs,
        "objective={objective.kind} reads {objective.outputs}, which model={model.name} does not return: choose a "
        "model of kind {found}, or objective=infonce",
        "objective=coca",
    ),
    GroupRule(
        _unread_outputs,
        "objective={objective.kind} does not read the {model.outputs} that model={model.name} returns, so a part of it "
        "is not trained: choose objective={found}, or model=vit_b32",
        "model=coca_tiny objective=infonce",
    ),
    GroupRule(
        lambda run: run.max_final_loss is not None and not run.objective.has_zero_minimum(run.data),
        "max_final_loss={max_final_loss} has no meaning for objective={objective.kind}, whose loss does not have the "
        "minimum 0: add max_final_loss=null, or choose objective=infonce with one right caption",
        "debug=overfit objective=dcl",
    ),
    # Frozen and initial weights.
    GroupRule(
        lambda run: not run.objective.reads_text and not run.model.text.frozen,
        "objective={objective.kind} gives the text tower no gradient: add model.text.lock=all, and initial weights "
        "with model.weights=… or model.text.weights=…",
        "model.weights=x objective=classification",
    ),
    GroupRule(
        _untrained_lock,
        "{found} freezes randomly initialized weights: give model.weights=…, or the weights of the tower alone, or "
        "remove the lock",
        "model.image.lock=all",
    ),
    GroupRule(
        _untrained_adapters,
        "{found} adapts randomly initialized weights: give model.weights=…, or the weights of the tower alone, or "
        "remove it",
        "model.image.lora.rank=4",
    ),
    GroupRule(
        lambda run: not run.model.image.has_weights and run.optimizer.image_lr_scale != 1,
        no_effect("optimizer.image_lr_scale={optimizer.image_lr_scale:g}", "with model.image.projection=none"),
        "model=stored_features model.image.projection=none optimizer.image_lr_scale=0.5",
    ),
    GroupRule(
        _nothing_trained,
        "model.image.{found} and model.text.lock=all leave no trainable weights: lock one tower only, or give the "
        "number of highest blocks to train",
        "model.weights=x model.image.lock=all model.text.lock=all",
    ),
    GroupRule(
        lambda run: (
            run.model.text.kept_positions is not None
            and run.model.weights is None
            and "text" not in run.model.tower_weights
        ),
        "model.text.stretch_keep={model.text.kept_positions} stretches the text positions of weights, and "
        "model.weights=null has none: give model.weights=… or model.text.weights=…, or remove it",
        "model.text.stretch_keep=10",
    ),
    # Images and captions.
    GroupRule(
        _options_of_images,
        no_effect("{found}", "with {model.image.kind.option}, {model.image.kind.reason}"),
        "model=stored_features data=webdataset data.shards=a.tar data.min_side=10",
    ),
    GroupRule(
        _options_of_squares,
        "{found} cannot be combined with {model.image.kind.option}, {model.image.kind.reason}: remove it; a teacher "
        "may be given by teacher.embeddings of the same samples",
        "model=naflex_tiny objective=distillation teacher.weights=x",
    ),
    GroupRule(
        _parts_of_captions,
        "{found} draws parts of captions, and teacher.embeddings={teacher.embeddings} has the texts of whole captions: "
        "remove one of them, or give teacher.weights",
        "objective=distillation teacher.embeddings=a data.sub_captions=2",
    ),
    # The teacher.
    GroupRule(
        lambda run: run.objective.taught and run.teacher.source_option is None,
        "objective={objective.kind} needs a teacher: give teacher.weights=… (a run directory, or another value that "
        "model.weights accepts), or teacher.embeddings=… (a folder written by python -m clipx.embed)",
        "objective=distillation",
    ),
    GroupRule(
        lambda run: not run.objective.teacher_logits and len(run.teacher.folders) > 1 and run.teacher.source_option,
        "{found} names several teachers, and objective={objective.kind} has one reference: give one folder",
        "objective=drrho_clip 'teacher.embeddings=[a,b]'",
    ),
    GroupRule(
        lambda run: run.teacher.embeddings is not None and not run.data.indexed and run.teacher.source_option,
        "{found} needs sample indices, which data={data.kind} does not have: give teacher.weights instead",
        "objective=distillation teacher.embeddings=a data=stream evaluator=[]",
    ),
    # How it computes.
    GroupRule(
        lambda run: run.distributed.shards_parameters and not run.optimizer.shardable,
        "optimizer={optimizer.kind} needs whole parameters, which distributed={distributed.kind} shards over the "
        "ranks: use optimizer=adamw, or distributed=ddp",
        "distributed=fsdp optimizer=whole",
    ),
    GroupRule(
        lambda run: run.model.image.kind.most_tokens is not None and run.precision.tunes_shapes,
        "precision={precision.kind} searches kernels for each number of tokens, for minutes, and "
        "{model.image.kind.option} has tens of them: choose precision=amp_bf16 or float8",
        "model=naflex_tiny precision=int8",
    ),
    GroupRule(
        lambda run: run.model.has_adapters and run.precision.converts_layers,
        "precision={precision.kind} replaces linear layers, which model.image.lora and model.text.lora adapt: choose "
        "precision=amp_bf16, or remove the adapters",
        "model.weights=x model.image.lora.rank=4 precision=int8",
    ),
    GroupRule(
        lambda run: run.deterministic and run.compile.mode is CompileMode.max_autotune,
        "compile.mode=max_autotune selects kernels by their time, so deterministic=true cannot hold: remove one of "
        "them",
        "deterministic=true compile.towers=true compile.mode=max_autotune",
    ),
)
"""All rules, in the order in which they are checked."""
