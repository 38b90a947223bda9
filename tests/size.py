"""Size of the project, as one table: `.venv/bin/python tests/size.py [TREE] [--collect] [--no-run] [--json]`.

TREE is a checkout, by default that of this file: with a git worktree of another commit the same script measures before
and after a change. Every number is computed from the tree. Classes are found by name, so that their file may move; a
number that cannot be computed is "-", with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
PARTS = ("core", "extra", "bench", "launch", "tests")

# What a reader has to know for one optimizer step: classes, functions and aliases in clipx. Names with "|" between them
# are one concept, which exists as long as one of them does. Remove or rename an entry that the table reports as gone.
# First what trainer.py, learner.py and gradcache.py name in a step, then what is behind that.
CONCEPTS = """
Trainer.step Stages|Step Learner.backward|Learner.update Learner.settle|Skipped Teacher TorchRng
Objective.before_step|Objective.after_step NonFiniteSteps GradCache frozen_statistics _no_sync Precision StepInputs Comm
MasterWeights gradient_norms|update_norms Learner._clip SkippableStep hold_updates WeightAverage Objective Meter
""".split()
BEHIND = "HostCopy CudaCopies Packing|PackedImages Temperature Tiling|Products Pairs Tile Normaliser".split()
STEP_ENTRIES = ("Trainer.step", "Learner.step")
RUN = ("duration=4st", "schedule.warmup=2st")  # the default warm-up is longer than 4 steps

# The features of the inputs of a step, each by a regular expression of what its code is called, now and before.
FEATURES = {
    "stages": r"\.stages\b|StageSpec",
    "stored features": r"image\.features\b|Feature(Reader|View|Tower)|takes_features|parse_features",
    "images at their own aspect ratio": r"\.native\b|native=True|Native(Reader|Images|ImageTower)|PatchView|PackedImages"
    r"|ImagePack(er|ing)\b|image_packer",
    "decoding on the device": r"DeviceDecoder|Encoded(Images|Reader)|device_decod|device_crop|on_device=|view\.on_device",
    "several captions": r"captions_per_step|texts_per_sample|CaptionDraw|(texts?|captions)\.each\b|\beach: int = 1",
    "a second view": r"SecondView|second_(image|tokens|packing|size)|TeacherTexts|teacher\.(view|texts)\b|\band_for\b",
}

# Runs clipx.train, and writes what it imports, instantiates, and calls below STEP_ENTRIES.
PROGRAM = """
import json, runpy, sys
out, roots, entries = sys.argv[1], tuple(sys.argv[2].split("|")), sys.argv[3].split("|")
called, made, active = set(), set(), []
def watch(frame, event, argument):
    code = frame.f_code
    entry = code.co_qualname in entries and code.co_filename.startswith(roots)
    if event == "call":
        if code.co_name == "__init__":
            made.add(type(frame.f_locals.get("self")))
        active.extend([code] * entry)
        if active and code.co_filename.startswith(roots):
            called.add((code.co_filename, code.co_qualname))
    elif event == "return" and entry:
        active.pop()
sys.argv = ["clipx.train", *sys.argv[4:]]
sys.setprofile(watch)
try:
    runpy.run_module("clipx.train", run_name="__main__", alter_sys=True)
finally:
    sys.setprofile(None)
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    json.dump({"files": files, "called": list(called), "made": [k.__module__ for k in made]}, open(out, "w"))
"""


class Row(NamedTuple):
    """One number of the table. `value` is "-" if it cannot be computed, for the reason in `note`."""

    name: str
    value: int | str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of the project. `name`: its path relative to the checkout."""

    path: Path
    name: str

    @property
    def part(self) -> str:
        first, second = (*self.name.split("/"), "")[:2]
        return first if first != "clipx" else second if second in PARTS else "core"

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_bytes())

    def count_lines(self) -> int:
        return self.path.read_bytes().count(b"\n")  # as `wc -l`


class Project:
    """Files of a checkout; classes and functions of clipx and launch by qualified name, those of the core first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = list(self.files("clipx launch tests", "py"))
        self.code = sorted((s for s in self.sources if s.part != "tests"), key=lambda s: PARTS.index(s.part))
        found = [(source, name, node) for source in self.code for name, node in scoped(source.tree)]
        self.classes = [(s, name, node) for s, name, node in found if isinstance(node, ast.ClassDef)]
        self.functions = [(s, name, node) for s, name, node in found if isinstance(node, Function)]

    def files(self, folders: str, suffixes: str) -> Iterator[Source]:
        """Yields the files with one of the suffixes, without those in hidden folders."""
        for path in (path for folder in folders.split() for path in sorted((self.root / folder).rglob("*"))):
            name = path.relative_to(self.root)
            if path.suffix[1:] in suffixes.split() and path.is_file() and not any(p[0] == "." for p in name.parts):
                yield Source(path, name.as_posix())


def scoped(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Yields each class and function below a node with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function):
            yield f"{prefix}{child.name}", child
        yield from scoped(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef | Function) else prefix)


def words(*nodes: ast.AST | None) -> set[str]:
    """Returns the identifiers in annotations, decorators and bases, those in strings included."""
    return {word for node in nodes if node is not None for word in re.findall(r"\w+", ast.unparse(node))}


def parameters(function: Function) -> list[ast.arg]:
    """Returns the parameters of a function without `self` and `cls`."""
    of = function.args
    found = [*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg]
    return [parameter for parameter in found if parameter is not None and parameter.arg not in ("self", "cls")]


def fields(cls: ast.ClassDef) -> list[str]:
    """Returns the annotated fields that a class itself declares, without ClassVar."""
    own = [node for node in cls.body if isinstance(node, ast.AnnAssign) and "ClassVar" not in words(node.annotation)]
    return [ast.unparse(node.target) for node in own]


def packages(project: Project) -> list[Row]:
    """Returns the lines of each package and feature, each part, and clipx and launch together."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    named: dict[str, set[str]] = defaultdict(set)
    for source in project.files("clipx launch tests", "py js css sh"):
        kind, folders = "py" if source.path.suffix == ".py" else "other", source.name.split("/")[:-1]
        depth = 3 if folders[1:2] == ["extra"] else 2
        package = "/".join(folders[:depth]) if len(folders) > 1 else f"{folders[0]}/*"
        named[source.part].add(package)
        for key in {package, source.part, "tests" if source.part == "tests" else "clipx and launch"}:
            counts[key].update({f"{kind} lines": source.count_lines(), f"{kind} files": 1})
    order = [key for part in (*PARTS[:-1], "clipx and launch", "tests") for key in (*sorted(named[part]), part)]
    other = {key: f", {n['other lines']} lines of js, css, sh" for key, n in counts.items() if n["other lines"]}
    return [Row(key, counts[key]["py lines"], f"{counts[key]['py files']} files{other.get(key, '')}") for key in order]


def option_keys(project: Project) -> list[Row]:
    specs = [(source.part, spec) for source, _, spec in project.classes if spec.name.endswith("Spec")]
    parts = [part for part, spec in specs for name in fields(spec) if name not in ("kind", "_target_")]
    note = "fields of classes named …Spec, without kind, _target_ and ClassVar"
    return [Row("option keys", len(parts), note), Row("option keys without bench", sum(p != "bench" for p in parts))]


def docs(project: Project) -> list[Row]:
    other = [*project.root.glob("*.md"), *(s.path for s in project.files("clipx launch tests examples", "md"))]
    pages = {"words of docs": [s.path for s in project.files("docs", "md")], "words of other pages": other}
    counts = {name: sum(len(path.read_bytes().split()) for path in paths) for name, paths in pages.items()}
    return [Row(name, count, f"`wc -w` of {len(pages[name])} pages .md") for name, count in counts.items()]


def tests(project: Project, collect: bool) -> list[Row]:
    files = [s for s in project.sources if s.part == "tests" and s.path.name.startswith("test_")]
    functions = [n for s in files for n in ast.walk(s.tree) if isinstance(n, Function) and n.name.startswith("test_")]
    rows = [Row("test files", len(files)), Row("test functions", len(functions))]
    if collect:
        options = ("--collect-only", "-q", "-p", "no:cacheprovider")
        done = start(project.root, project.root, sys.executable, "-m", "pytest", *options, CI="true")
        count = None if done.returncode else re.search(r"(\d+)\S* tests collected", done.stdout)
        rows.append(Row("test cases", int(count[1]), "CI=true") if count else failed("test cases", done))
    return rows


def start(root: Path, folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, on the CPU, with clipx and launch of the checkout `root`."""
    env |= {"PYTHONPATH": f"{root}{os.pathsep}{root / 'launch'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False)


def failed(name: str, done: subprocess.CompletedProcess[str]) -> Row:
    last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
    return Row(name, "-", f"exit code {done.returncode}: {last}")


def default_run(project: Project) -> list[Row]:
    """Runs a training of 4 steps under a profiler, and counts what it uses of clipx and launch."""
    root, roots = project.root, tuple(f"{project.root / top}{os.sep}" for top in ("clipx", "launch"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "used.json")
        given = (str(out), "|".join(roots), "|".join(STEP_ENTRIES), *RUN, f"run_dir={folder}/run")
        done = start(root, Path(folder), sys.executable, "-c", PROGRAM, *given, CLIPX_CACHE=f"{folder}/cache")
        if done.returncode:
            return [failed("modules loaded", done)]
        used = json.loads(out.read_text())
    if not str(used["files"]["clipx"]).startswith(roots):
        raise SystemExit(f"error: the run imports clipx from {used['files']['clipx']}: expected a file in {root}")
    files = {file for file in used["files"].values() if file and file.startswith(roots)}
    loaded = [s for s in project.code if str(s.path) in files or s.module == "clipx.train"]  # train is __main__
    called = [(file, name) for file, name in used["called"] if "<" not in name]
    return [
        Row("modules loaded", len(loaded), f"of clipx and launch, by clipx.train {' '.join(RUN)}"),
        Row("lines of these modules", sum(source.count_lines() for source in loaded)),
        Row("classes defined in them", sum(source in loaded for source, _, _ in project.classes)),
        Row("classes instantiated", sum(name.startswith("clipx") for name in used["made"]), "by an __init__ in Python"),
        Row("functions that a step calls", len(called) or "-", f"below {' or '.join(STEP_ENTRIES)}, no nested ones"),
        Row("classes of these methods", len({(f, n.rpartition(".")[0]) for f, n in called if "." in n})),
        Row("modules of these functions", len({file for file, _ in called})),
    ]


def coupling(project: Project) -> list[Row]:
    found = {name: (source, cls) for source, name, cls in reversed(project.classes)}  # the first one of a name
    batch, trainer = found.get("Batch"), found.get("Trainer")
    names = ("attributes of Trainer", "modules imported by Trainer", "functions that take a Trainer")
    rows = [Row("fields of Batch", "-", "no class Batch in clipx")]
    if batch is not None:
        rows = [Row("fields of Batch", len(fields(batch[1])), batch[0].name)]
    if trainer is None:
        return [*rows, *(Row(name, "-", "no class Trainer in clipx") for name in names)]
    source, cls = trainer
    stored = {ast.unparse(n) for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    others = [node for _, name, node in project.functions if not name.startswith("Trainer.")]
    return [
        *rows,
        Row(names[0], sum(name.count(".") == 1 and name.startswith("self.") for name in stored), "assigned to self"),
        Row(names[1], len(imported(project, source)), f"of clipx, anywhere in {source.name}, for types included"),
        Row(names[2], sum("Trainer" in words(*(p.annotation for p in parameters(f))) for f in others), "by annotation"),
    ]


class _WithoutText(ast.NodeTransformer):
    """Empties the strings of code: options are also named in messages, docstrings and lists of keys."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def features(project: Project) -> list[Row]:
    """Counts the files of clipx and launch, without bench, whose code names a feature of the inputs."""
    texts = {s: ast.unparse(_WithoutText().visit(copy.deepcopy(s.tree))) for s in project.code if s.part != "bench"}
    found = {name: [s.name for s, text in texts.items() if re.search(rule, text)] for name, rule in FEATURES.items()}
    return [
        Row(name, len(files), " ".join(file.removeprefix("clipx/") for file in files)) for name, files in found.items()
    ]


def imported(project: Project, source: Source) -> set[str]:
    """Returns the modules of clipx that a file imports, anywhere in it."""
    found, modules = set[str](), {source.module for source in project.code}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & modules or {node.module}
    return {name for name in found if name.partition(".")[0] == "clipx"}


def concepts(project: Project, title: str = "concepts of a step", names: Sequence[str] = CONCEPTS) -> Row:
    """Counts the concepts of which a name is defined in clipx. A method is also found without its class."""
    code = [source for source in project.code if source.part in ("core", "extra")]
    known = {name for source in code for name, _ in scoped(source.tree)}
    known |= {name.rpartition(".")[2] for name in known}
    assigned = [node for source in code for node in source.tree.body if isinstance(node, ast.Assign)]
    known |= {ast.unparse(target) for node in assigned for target in node.targets}
    gone = [name for name in names if known.isdisjoint(name.split("|"))]
    return Row(title, len(names) - len(gone), ", ".join(f"gone: {name}" for name in gone))


def measure(root: Path, run: bool = False, collect: bool = False) -> dict[str, list[Row]]:
    """Returns the rows of each section of the table."""
    project = Project(root)
    signatures = [Row(name, len(parameters(node)), source.name) for source, name, node in project.functions]
    return {
        "lines of .py, as `wc -l`": packages(project),
        "options, docs, tests": [*option_keys(project), *docs(project), *tests(project, collect)],
        "default run": default_run(project) if run else [],
        "coupling": [*coupling(project), concepts(project), concepts(project, "concepts behind them", BEHIND)],
        "files that name a feature of the inputs": features(project),
        "files of more than 400 lines": [Row(s.name, n) for s in project.code if (n := s.count_lines()) > 400],
        "longest signatures, in parameters": sorted(signatures, key=lambda row: row.value, reverse=True)[:10],
    }


def table(sections: dict[str, list[Row]]) -> str:
    """Returns the sections as text."""
    lines = []
    for title, rows in sections.items():
        lines += ["", title] if rows else []
        for name, value, note in rows:
            shown = f"{value:,}" if isinstance(value, int) else value
            lines.append(f"  {name:34}{shown:>7}  {note}".rstrip())
    return "\n".join(lines[1:])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Prints the size of the project.")
    parser.add_argument("tree", type=Path, nargs="?", default=Path(__file__).parents[1], metavar="TREE")
    parser.add_argument("--collect", action="store_true", help="also count the test cases that pytest collects")
    parser.add_argument("--no-run", action="store_true", help="leave out the training run")
    parser.add_argument("--json", action="store_true", help="print JSON: lists of [name, value, note] by section")
    given = parser.parse_args()
    found = measure(given.tree.resolve(), not given.no_run, given.collect)
    print(json.dumps(found, ensure_ascii=False) if given.json else table(found))


if __name__ == "__main__":
    main()
