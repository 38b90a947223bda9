"""Command lines for tests/command_lines.py, drawn from the options that are registered: right ones and wrong ones."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clipx.config.catalogue import commands, folder_of, groups, load_all, options
from clipx.config.entries import field_docs, shown_fields
from clipx.config.options import default_of
from clipx.config.registry import LIST_GROUPS, MISSING, kinds
from clipx.extra.open_clip.flags import FLAGS

Words = tuple[str, ...]

# Words without which a command or an option is an error, with the files of tests/command_lines.py.
_NEEDED = {
    "clipx.evaluate": ("run=w.pt", "data=shapes", "evaluator=[retrieval]"),
    "clipx.embed": ("run=w.pt", "out=out", "data=shapes"),
    "clipx.score": ("out=out", "data=shapes"),
    "clipx.caption": ("run=w.pt", "images=set"),
    "clipx.check": ("run=outputs/x", "expected=cc3m_rn50_openclip"),
    "clipx.export": ("run=outputs/x", "out=out", "format=hf"),
    "clipx.prepare": ("source=t.csv", "out=out"),
    "clipx.index": ("shards=a.tar",),
    "clipx.look": ("data=shapes",),
    "clipx.select": ("scores=a.parquet", "out=ids.npy"),
    "clipx.vocabulary": ("data=shapes",),
    "clipx.wise_ft": ("base=w.pt", "finetuned=w.pt", "data=shapes", "data@reference=digits"),
    "data=csv": ("data.path=t.csv",),
    "data=folder": ("data.path=set",),
    "data=hf": ("data.path=set",),
    "data=benchmark": ("data.path=set",),
    "data=parquet": ("data.path=a.parquet",),
    "data=mixture": ("+data@data.sources.a=shapes",),
    "objective=classification": ("model.weights=w.pt", "model.text.lock=all"),
    "objective=coca": ("model=coca_tiny",),
    "objective=distillation": ("teacher.weights=w.pt",),
    "objective=drrho_clip": ("teacher.embeddings=e",),
}
_SHARDS = ("webdataset", "cc12m", "cc3m", "laion400m", "laion2b", "datacomp1b", "datacomp_small", "datacomp_medium")
_NEEDED |= {f"data={name}": ("data.shards=a.tar",) for name in _SHARDS}
_DEFAULTS = {
    "model": "tiny",
    "data": "shapes",
    "objective": "infonce",
    "optimizer": "adamw",
    "schedule": "cosine",
    "precision": "fp32",
    "distributed": "ddp",
    "checkpoint": "local",
}
"""Options whose keys are drawn if no other option is."""
_BENCHMARKS = ("checkpoint", "gpu", "loader", "loss", "scaling", "step")
_SWEEP = (
    *(("status",), ("status", "set", "--json"), ("results", "set"), ("status", "set", "--best"), ("logs", "set", "0")),
    *(("cancel", "set"), ("resume", "set"), ("report", "set"), ("script", "--help")),
)
MODULES = (*(command.module for command in commands()), "clipx_launch", "clipx")
"""The modules of all commands."""

_ODD_NUMBERS = (
    "1e400 -1e400 nan inf -inf 10**30 1000000000000000000000000000000 -0 0x10 1_000 ٣ 1e-400 -1 1.5.2".split()
)
_ODD_TEXTS = r"""naïve|漢字|Ugpj|🙂|a b|a\|a'b|a"b|%s|~|*|-|--|a,b|a:b|!!python""".replace("U", "\u202e").split("|")
_UNBALANCED = """'abc "abc [1,2 1,2] {a:1 {a:1}} [[] (1 ${a f( choice(1 [a,,b] {:1} '""".split()
_INTERPOLATIONS = (
    *("${nothing}", "${model.nothing}", "${oc.env:NOTHING_SET}", "${oc.env:AWS_SECRET_ACCESS_KEY}", "${", "${}"),
    *("${oc.decode:1}", "${hydra:job.name}", "${seed}${seed}", "${.kind}", "${..seed}", "${oc.nothing:1}", "???"),
)


_OF_TRAIN = """data=csv data.path={}|data=webdataset data.shards={}|data=folder data.path={}|model.weights={}|data=parquet data.path={}|
resume={}|data=hf data.path={}|data=csv data.path=t.csv data.held_out_path={}|model.image.weights={}|data=benchmark data.path={}|evaluator=[zeroshot] evaluator.zeroshot.classnames={}""".replace(
    "\n", ""
).split("|")


@dataclass(frozen=True)
class Key:
    """A key of a command: its place, the type of its values, their default, and what its docstring says of them."""

    name: str
    type: Any
    default: Any
    doc: str

    @property
    def optional(self) -> bool:
        return types.NoneType in typing.get_args(self.type) or self.default is None or self.type is Any

    @property
    def plain(self) -> Any:
        """The type of the values that are not null."""
        if typing.get_origin(self.type) not in (types.UnionType, typing.Union):
            return self.type
        return next(one for one in typing.get_args(self.type) if one is not types.NoneType)

    def right(self, draw: random.Random) -> str:
        """Returns a value of the type, and of the range that the docstring states if it does."""
        if self.optional and draw.random() < 0.15:
            return "null"
        kind = self.plain
        if kind is bool:
            return draw.choice(("true", "false"))
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return draw.choice(list(kind.__members__))
        if kind in (int, float):
            return self._number(draw, kind)
        if typing.get_origin(kind) is list and not isinstance(self.default, list):
            return "null" if self.optional else "[a]"
        if self.default in (None, MISSING, ""):
            return draw.choice(("w.pt", "set", "a", "10st"))
        text = ",".join(map(str, self.default)) if isinstance(self.default, list) else str(self.default)
        return f"[{text}]" if isinstance(self.default, list) else text

    def _number(self, draw: random.Random, kind: type) -> str:
        least = re.search(r"at least (\d+)", self.doc)
        span = re.search(r"in [\[(]([\d.]+), ?([\d.]+)[\])]", self.doc)
        base = self.default if isinstance(self.default, int | float) else 2
        value: float = draw.choice((base, base, base * 2, base / 2, base + 1))
        if span:
            value = draw.choice((base, float(span[1]), float(span[2]), (float(span[1]) + float(span[2])) / 2))
        if least:
            value = max(value, int(least[1]))
        return str(round(value)) if kind is int else f"{value:g}"


class Draw:
    """Draws command lines by one random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    @staticmethod
    def load() -> None:
        """Registers all options."""
        load_all()

    # ------------------------------------------------------------------------------------------------------ right

    def right(self) -> tuple[str, str, Words]:
        """Returns (sort, module, words) of a line of right values, which a rule between them may refuse."""
        module = self.rng.choice((*MODULES, *("clipx.train",) * 12))
        return module.rpartition(".")[2], module, self._right(module, self.rng.randrange(5), self.rng.randrange(5))

    def _right(self, module: str, choices: int, values: int) -> Words:
        if module == "clipx":
            return self.rng.choice(((), ("--help",), ("--version",)))
        if module == "clipx_launch":
            return self.rng.choice(_SWEEP)
        words = {_key(word): word for word in _NEEDED.get(module, ())}
        start = [self.rng.choice(_BENCHMARKS)] if module == "clipx.bench" else []
        for group, names in self.rng.sample(chosen := list(self.groups(module).items()), min(choices, len(chosen))):
            name = self.rng.choice(names)
            words[group] = f"{group}=[{name}]" if group in LIST_GROUPS else f"{group}={name}"
        for word in list(words.values()):
            words |= {_key(one): one for one in _NEEDED.get(word, ())}
        keys = [key for key in self.keys(module, tuple(words.values()), *start) if key.name not in words]
        for key in self.rng.sample(keys, min(values, len(keys))):
            words[key.name] = f"{key.name}={key.right(self.rng)}"
        return (*start, *words.values())

    def groups(self, module: str) -> dict[str, Sequence[str]]:
        """Returns the options of each group of a command, by the name of the group."""
        return {group: names for group, names in _options().items() if group in _fields(module)}

    def keys(self, module: str, words: Sequence[str] = (), benchmark: str | None = None) -> list[Key]:
        """Returns the keys of a command with these choices."""
        chosen = dict(word.split("=", 1) for word in words if "=" in word)
        if benchmark is not None:
            return _keys(kinds("bench")[benchmark], "")
        found = []
        for key in _keys(_spec(module), ""):
            if key.name not in groups():
                found.append(key)
            elif key.name in _DEFAULTS and key.name in _fields(module) and key.name not in LIST_GROUPS:
                kind = _kind(key.name, chosen.get(key.name, "")) or _kind(key.name, _DEFAULTS[key.name])
                found += _keys(kinds(key.name)[kind], f"{key.name}.")
        return found

    # ------------------------------------------------------------------------------------------------------ wrong

    def wrong(self, number: int) -> tuple[str, str, Words]:
        """Returns (what is wrong, module, words). `number` selects what is wrong, one after the other."""
        name, make = list(_WRONG.items())[number % len(_WRONG)]
        module = self.rng.choice((*(command.module for command in commands()), *("clipx.train",) * 6))
        words = list(self._right(module, self.rng.randrange(2), self.rng.randrange(2)))
        if module == "clipx.bench" and name == "nothing required":
            module, words = "clipx.train", ["data=csv"]
        broken = make(self, module, words)
        return name, module, tuple(broken)

    def key(self, module: str, words: Sequence[str], suits: Callable[[Key], bool] = lambda key: True) -> Key:
        """Returns a key that suits, of the command or of a run."""
        benchmark = next((word for word in words if word in _BENCHMARKS), "loss") if module == "clipx.bench" else None
        found = [key for key in self.keys(module, words, benchmark) if suits(key)]
        typed = {_key(word) for word in words}
        return self.rng.choice([key for key in found if key.name not in typed] or [Key("seed", int, 0, "")])

    def _mistyped(self, module: str, words: list[str]) -> list[str]:
        name = self.key(module, words).name
        at = self.rng.randrange(len(name) - 1)
        changed = self.rng.choice(
            (name[:at] + name[at + 1 :], f"{name[:at]}q{name[at:]}", name.upper(), f"{name}s", f"x.{name}")
        )
        return [*words, f"{changed}=1"]

    def _type(self, module: str, words: list[str]) -> list[str]:
        key = self.key(module, words, lambda key: key.plain in (int, float, bool) or _is_enum(key.plain))
        value = self.rng.choice(("many", "on_off", "[1,2]", "{a:1}", "1.5x", "yes please", "none_such"))
        return [*words, f"{key.name}={value}"]

    def _range(self, module: str, words: list[str]) -> list[str]:
        key = self.key(
            module, words, lambda key: key.plain in (int, float) and bool(re.search("at least|bove|in \\[", key.doc))
        )
        return [*words, f"{key.name}={self.rng.choice(('-1', '-7', '-1e9' if key.plain is float else '-1000000000'))}"]

    def _odd_word(self, word: str) -> str:
        name, _, value = word.partition("=")
        forms = "N = V|N= V| N=V|N|=V|N==V|N:V|+N=V|~N|~~N|+++N=V|-N=V|--N=V|N.=V|.N=V"
        return self.rng.choice(forms.split("|")).replace("N", name).replace("V", value)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _put(values: Sequence[str], suits: Callable[[Key], bool]) -> Callable[[Draw, str, list[str]], list[str]]:
    """Returns what gives a key that suits one of the values."""

    def put(draw: Draw, module: str, words: list[str]) -> list[str]:
        return [*words, f"{draw.key(module, words, suits).name}={draw.rng.choice(values)}"]

    return put


def _number(key: Key) -> bool:
    return key.plain in (int, float)


def _typed(key: Key) -> bool:
    return key.plain in (int, float, bool) or _is_enum(key.plain)


def _any(key: Key) -> bool:
    return True


def _unused_key(draw: Draw, module: str, words: list[str]) -> list[str]:
    group = draw.rng.choice(("objective", "optimizer", "data", "schedule", "precision"))
    own = {key.name for key in draw.keys("clipx.train", words)}
    names = [key.name for cls in kinds(group).values() for key in _keys(cls, f"{group}.") if key.name not in own]
    return [*words, f"{draw.rng.choice(names or ['data.nothing'])}=1"]


def _unknown_option(draw: Draw, module: str, words: list[str]) -> list[str]:
    known = list(draw.groups(module)) or ["data"]
    group = draw.rng.choice(known)
    value = draw.rng.choice(
        ("ViT-B-32", "none_such", "3", "true", "[a,b]", "{a:1}", "a/b", "../data/csv", "'x y'", "adamw,")
    )
    return [word for word in words if _key(word) != group] + [f"{group}={value}"]


def _packages(draw: Draw, module: str, words: list[str]) -> list[str]:
    odd = """+data@evaluator.nothing.sets.a=csv data@=csv @data=csv data@data@x=csv +data@nowhere=shapes model@objective=tiny
    +evaluator@x=zeroshot +logger@logger=tensorboard data@_global_=shapes optimizer@a.b=sgd +data@evaluator.retrieval.sets.=csv ~data@nothing""".split()
    return [*words, draw.rng.choice(odd)]


def _missing(draw: Draw, module: str, words: list[str]) -> list[str]:
    required = [command for command in _NEEDED if command.startswith("clipx.")]
    options_ = [word for word in _NEEDED if "=" in word]
    if module in required:
        return []
    if module == "clipx.plan":  # which needs no files
        return ["ranks="]
    return [draw.rng.choice(options_)]


def _paths(draw: Draw, module: str, words: list[str]) -> list[str]:
    odd = (
        "nowhere /nowhere/a.pt set/nowhere.tar a.tar/b",
        "x" * 300,
        "~nobody/x nowhere/{0..9}.tar @nowhere.txt *.nope",
    )
    path = draw.rng.choice(" ".join(odd).split())
    of = {
        "clipx.train": _OF_TRAIN,
        "clipx.prepare": ("source={} out=out",),
        "clipx.index": ("shards={}",),
        "clipx.check": ("run={} expected=cc3m_rn50_openclip",),
        "clipx.export": ("run={} out=out format=hf",),
        "clipx.caption": ("run={} images=set", "run=w.pt images={}"),
        "clipx.embed": ("run={} out=out data=shapes",),
        "clipx.evaluate": ("run={}",),
        "clipx.select": ("scores={} out=a.npy",),
    }
    line = draw.rng.choice(of.get(module, ("data=csv data.path={}",)))
    return [word.replace("{}", path) for word in line.split()]


def _sweeps(draw: Draw, module: str, words: list[str]) -> list[str]:
    odd = """optimizer.lr=-1,-2|seed=-1,-2|seed=a,b|model=a,b|optimizer.lr=choice(|seed=range(1,|seed=range(0)|data.batch_size=1,0|nothing=1,2|seed=glob(x)|seed=interval(0,1)|hydra.sweep.dir=|hydra/launcher=nope|hydra/sweeper=nope seed=1,2"""
    return ["-m", *draw.rng.choice(odd.split("|")).split()]


def _several(draw: Draw, module: str, words: list[str]) -> list[str]:
    names = [name for name in _WRONG if name not in ("several", "sweep", "path", "nothing required", "help")]
    for name in draw.rng.sample(names, 2):
        words = _WRONG[name](draw, module, words)
    draw.rng.shuffle(words)
    return words


def _repeated(draw: Draw, module: str, words: list[str]) -> list[str]:
    key = draw.key(module, words, _number)
    return [*words, f"{key.name}={key.right(draw.rng)}", f"{key.name}={key.right(draw.rng)}"]


_WRONG: dict[str, Callable[[Draw, str, list[str]], list[str]]] = {
    "mistyped key": Draw._mistyped,
    "wrong type": Draw._type,
    "out of range": Draw._range,
    "odd number": _put(_ODD_NUMBERS, _number),
    "empty": _put(("",), lambda key: key.plain in (int, float, bool)),
    "odd text": _put(_ODD_TEXTS, _typed),
    "unicode key": lambda draw, module, words: [*words, f"{draw.rng.choice(_ODD_TEXTS)}=1"],
    "unbalanced": _put(_UNBALANCED, _any),
    "odd word": lambda draw, module, words: [*words, draw._odd_word(f"{draw.key(module, words, _number).name}=1")],
    "repeated": _repeated,
    "unknown option": _unknown_option,
    "unused key": _unused_key,
    "open_clip flag": lambda draw, module, words: [
        *words,
        f"--{draw.rng.choice(list(FLAGS))}",
        *draw.rng.choice(((), ("8",))),
    ],
    "help": lambda draw, module, words: [
        "--help",
        draw.rng.choice(("nonsense.key", "漢字", "a=b=c", "=", "x" * 5000, "'")),
    ],
    "nothing required": _missing,
    "sweep": _sweeps,
    "config folder": lambda draw, module, words: [
        *words,
        draw.rng.choice(
            (
                "--config-dir=nowhere",
                "--config-dir=t.csv",
                "--config-dir=",
                "--config-dir",
                "--config-name=nope",
                "--config-path=/x",
                "-cn=x",
            )
        ),
    ],
    "path": _paths,
    "null": _put(("null",), lambda key: not key.optional and key.plain in (int, float, bool, str)),
    "collection": _put(
        ("[1,2]", "{a:1}", "[[1]]", "[{a:[1]}]", "{a:{b:1}}"), lambda key: key.plain in (int, float, bool)
    ),
    "interpolation": _put(_INTERPOLATIONS, _typed),
    "long": _put(("x" * 100_000, "[" + "1," * 40_000 + "1]", "9" * 100_000, "[" * 20_000), _typed),
    "control": _put(("a\nb", "a\x1b[31m", "\x7f", "a\tb", "\r", "\x01", "a\u2028b"), _any),
    "package": _packages,
    "several": _several,
}


@functools.cache
def _spec(module: str) -> type:
    return next(command.spec for command in commands() if command.module == module)


@functools.cache
def _kind(group: str, name: str) -> str:
    """Returns the kind of an option; empty if there is no such option."""
    found = options(group).get(name)
    return "" if found is None else found.kind


@functools.cache
def _fields(module: str) -> set[str]:
    """Returns the keys of a command that have an effect."""
    docs = {} if module == "clipx.bench" else field_docs(_spec(module))
    return {name for name, doc in docs.items() if not doc.startswith("Unused")}


@functools.cache
def _options() -> dict[str, list[str]]:
    return {folder_of(group): list(options(group)) for group in groups() if folder_of(group) != "bench"}


@functools.cache
def _keys(cls: type, prefix: str) -> list[Key]:
    """Returns the keys of a spec, and those of the specs in it."""
    hints, docs, found = typing.get_type_hints(cls), field_docs(cls), list[Key]()
    for field in shown_fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint) and field.name not in groups():
            found += _keys(typing.cast("type", hint), f"{name}.")
        else:
            found.append(Key(name, hint, default_of(field), docs.get(field.name, "")))
    return found
