"""Translates a command line with flags of open_clip's trainer to one of clipx."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clipx.config.grammar import in_shell
from clipx.config.other_trainers import OtherTrainer, register_trainer
from clipx.extra.open_clip.flags import FLAGS, NONE, NUMBERS, PAIRS
from clipx.extra.open_clip.rules import AUGMENTATIONS, PLACE, PLACES, Given, evaluated

_NUMBER = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?")


def flag_name(word: str) -> str | None:
    """Returns the name of the flag of open_clip that a typed word is, as `train-data`. None: it is none."""
    name = word.partition("=")[0].removeprefix("--").replace("_", "-")
    return name if word.startswith("--") and name in FLAGS else None


def read(words: Sequence[str], world: int = 1) -> Given:
    """Reads typed words: the last values of each flag of open_clip, and the other words."""
    given, rest, typed = {}, list(words), []
    while rest:
        word = rest.pop(0)
        name = flag_name(word)
        if name is None:
            typed.append(word)
            continue
        given[name] = [word.partition("=")[2]] if "=" in word else []
        many = FLAGS[name].takes in (NUMBERS, PAIRS)
        while rest and (many or not given[name]) and _is_value(rest[0], FLAGS[name].takes):
            given[name].append(rest.pop(0))
    return Given(given, typed, world)


def _is_value(word: str, takes: str) -> bool:
    if takes == PAIRS:
        return word.partition("=")[0] in (*AUGMENTATIONS, "re_count", "use_timm")
    number = _NUMBER.fullmatch(word) is not None
    return takes != NONE and (number or (takes != NUMBERS and not word.startswith("-")))


def translate(given: Given) -> list[str]:
    """Returns the overrides for the flags, the last one of each key. What they do not say is added to `given.notes`."""
    words = [word for name in given.values for word in FLAGS[name].words(name, given)]
    reasons: dict[str, list[str]] = {}
    for name in given.values:
        if not FLAGS[name].overrides:
            reasons.setdefault(FLAGS[name].reason, []).append(f"--{name}")
    for reason, flags in reasons.items():
        given.notes.append(f"{' and '.join(flags)} {'is' if len(flags) == 1 else 'are'} not needed, {reason}")
    return list({word.partition("=")[0]: word for word in words}.values())


def answer(
    words: Sequence[str],
    known: Sequence[str] = (),
    command: str = "train",
    program: Sequence[str] = ("python", "-m"),
    world: int = 1,
) -> str:
    """Returns the message for typed words with flags of open_clip: the whole command to write, quoted for a shell.

    `known`: the flags of clipx's commands. `program`: the words before the module. `world`: the number of ranks.
    """
    given = read(words, world)
    kept, strange = _kept(given.typed, known)
    given.notes += [f"{flag} is a flag of neither and left out" for flag in strange]
    has_weights = "pretrained" in given or given.get("model").startswith(PLACES)
    evaluates = {"imagenet-val", "val-data"} & given.values.keys() and has_weights and "train-data" not in given
    if evaluates or command == "evaluate":
        command, overrides = "evaluate", evaluated(given)
    else:
        overrides = translate(given)
    rule = f"{_list([f'--{name}' for name in given.values])} of open_clip 3.3"
    if not overrides:
        return f"{rule}: remove {'it' if len(given.values) == 1 else 'them'} ({'; '.join(given.notes)})"
    typed = {word.partition("=")[0] for word in kept}
    overrides = [word for word in overrides if word.partition("=")[0] not in typed]
    notes = f" ({'; '.join(dict.fromkeys(given.notes))})" if given.notes else ""
    if command not in ("train", "evaluate"):
        line = " ".join(map(_quoted, overrides))
        return f"{rule}'s trainer: clipx.train has {line}{notes}, --help lists the keys of this command"
    line = " ".join(map(_quoted, [*program, f"clipx.{command}", *overrides, *kept]))
    return f"{rule}: write {line}{notes}"


def _kept(typed: Sequence[str], known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words to keep, and the flags that nothing knows; the words after these are kept by neither."""
    kept, strange, dropping = [], [], False
    for word in typed:
        flag = word.partition("=")[0]
        if word.startswith("-") or "=" in word:
            dropping = word.startswith("--") and not any(name.startswith(flag) for name in known)
            strange += [flag] * dropping
        kept += [] if dropping else [word]
    return kept, strange


def _quoted(word: str) -> str:
    return in_shell(word).replace(f"'{PLACE}'", PLACE)


def _list(flags: Sequence[str]) -> str:
    shown = " and ".join(flags) if len(flags) < 3 else f"{flags[0]}, {flags[1]}, …"
    return f"{shown} {'is a flag' if len(flags) == 1 else 'are flags'}"


def _overrides(name: str) -> list[str]:
    """Returns what to write for a key that is named as a flag."""
    flag = name.replace("_", "-")
    return translate(Given({flag: []}, ["model="])) if flag in FLAGS else []


register_trainer(OtherTrainer("open_clip 3.3", lambda word: flag_name(word) is not None, answer, _overrides))
