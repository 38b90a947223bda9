"""The commands as users type them, in separate processes."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.runs import SMALL, VIT, run

from clipx.commands import implementation
from clipx.config.catalogue import groups, load_groups
from clipx.config.registry import kinds

TRAIN = (sys.executable, "-m", "clipx.train")
# Modules that a start must not import: each takes between 0.1 s and several seconds.
HEAVY = (
    *("torch", "torchvision", "timm", "transformers", "numpy", "PIL", "pyarrow", "fsspec", "s3fs", "safetensors"),
    *("tokenizers", "matplotlib", "rich", "tensorboard", "wandb", "sklearn", "submitit", "asyncio"),
    *("clipx.trainer.trainer", "clipx.checkpoint.format", "clipx.checkpoint.async_writer", "clipx.checkpoint.state"),
)


LARGE = ["model=vit_l14", "data=laion400m", "--cfg", "job"]


def test_commands_that_do_not_train_import_no_heavy_module() -> None:
    """None of the heavy modules, and fewer than 600 in total."""
    lines = [
        "import sys",
        "import clipx.__main__",
        "assert not {'hydra', 'omegaconf', 'argparse'} & sys.modules.keys()",
    ]
    lines += ["from clipx.train import main"]
    for arguments in (["modl=x"], ["--help"], ["--help", "data.shuffle_window"], ["-sc", "install=bash"], LARGE):
        lines += [f"sys.argv = ['clipx-train', *{arguments}]", "try:", "    main()", "except SystemExit:", "    pass"]
        lines += [f"loaded = {{*{HEAVY}}} & sys.modules.keys()", "assert not loaded, (sys.argv, loaded)"]
        lines += ["assert len(sys.modules) < 600, (sys.argv, len(sys.modules))"]
    printed = run(sys.executable, "-c", "\n".join(lines)).stdout
    for part in ("data: benchmark, cc12m", "shuffle_window", "hydra_bash_completion"):
        assert part in printed


# Modules of the options of a default run.
CHOSEN = {
    *("clipx.objective.infonce", "clipx.optimizer.spec", "clipx.schedule", "clipx.precision.spec"),
    *("clipx.distributed.ddp", "clipx.checkpoint.spec", "clipx.evaluator.retrieval", "clipx.evaluator.zeroshot"),
    *("clipx.logger.tensorboard", "clipx.model.spec", "clipx.model.text_spec", "clipx.data.shapes"),
    "clipx_launch.options",
}
RARE = {"help", "entries", "meant"}


def test_a_run_imports_the_modules_of_the_options_that_it_chooses() -> None:
    load_groups()
    classes = {(group, kind): cls for group in groups() for kind, cls in kinds(group).items()}
    modules = {f"{group} {kind}": cls.__module__ for (group, kind), cls in classes.items()}
    lines = [
        "import sys",
        "from clipx.train import main",
        "sys.argv = ['clipx-train', '--cfg', 'job']",
        "main()",
        "from clipx.trainer.spec import compose",
        "compose()",
        "print('loaded', *sys.modules)",
        "from clipx.config.registry import spec_class",
        f"for name, module in {modules}.items():",
        "    assert spec_class(*name.split()).__module__ == module, name",
    ]
    loaded = set(run(sys.executable, "-c", "\n".join(lines)).stdout.splitlines()[-1].split()[1:])
    assert loaded & {*modules.values()} == CHOSEN
    assert not {name for name in loaded if name.startswith("clipx.bench")}
    assert not {f"clipx.config.{name}" for name in RARE} & loaded
    assert not {name for name in loaded if name.startswith("clipx.extra.") and name.count(".") > 2}


def test_what_packages_add_is_found_without_a_configuration() -> None:
    lines = ["from clipx.config.registry import kinds", "from clipx.weights.formats import formats"]
    lines += ["print(*formats())", "print(*kinds('model'))"]
    found = run(sys.executable, "-c", "\n".join(lines)).stdout.splitlines()
    assert "siglip2" in found[0].split() and "naflex" in found[1].split()


EARLY = {
    "look model=weights out=a.html": "model=weights takes the sizes of a new run from the configuration",
    "train model=vit_l14 data=laion400m": "data.shards has no value: give the shards of laion400m",
    "train data=csv +data@evaluator.retrieval.sets.a=folder data.path=none.csv": "sets.a.path has no value: give a folder",
    "train data.batch_size=50000": "data.batch_size=50000 is larger than the data set of 12,000 samples",
    "train distributed=cpu precision=fp32 precision.tf32=true": "precision.tf32=true has no effect on cpu",
    "train distributed.bucket_mb=50": "distributed.bucket_mb=50.0 has no effect on one rank",
    "train model.weights=nowhere": "model.weights=nowhere does not exist: give a run directory",
    "train resume=latest run_dir=here": "resume=latest: here holds no run",
    "train resume=latest run_dir=here RANKS=3": "data.batch_size=256 is not divisible by 3 ranks",
    "embed data=hf run=w.pt out=out": "data.path has no value: give the folder of a data set",
}


def test_what_is_known_without_torch_is_said_before_it_is_imported(tmp_path: Path) -> None:
    """Three ranks look for no files, of which they need not see the same."""
    lines = ["import importlib, os, sys", f"os.chdir({str(tmp_path)!r})"]
    for typed in EARLY:
        command, *words = typed.split()
        if words[-1] == "RANKS=3":
            lines += ["os.environ |= dict(RANK='0', WORLD_SIZE='3', MASTER_ADDR='localhost', MASTER_PORT='29500')"]
            words.pop()
        body = implementation(f"clipx.{command}")
        lines += [f"sys.argv = ['clipx', *{words}]", "try:", f"    importlib.import_module('{body}').main()"]
        lines += [
            "except SystemExit as end:",
            "    assert end.code in (1, 2), end.code",
            "assert 'torch' not in sys.modules",
        ]
        if command == "train":
            lines += ["for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): os.environ.pop(name, None)"]
    said = run(sys.executable, "-c", "\n".join(lines)).stderr.splitlines()
    assert len(said) == len(EARLY), said
    for line, part in zip(said, EARLY.values(), strict=True):
        assert line.startswith("error") and part in line, line
    assert not list(tmp_path.iterdir())


TINY = (*SMALL, *VIT, "duration=2st", "schedule.warmup=1st", "checkpoint=none")


def test_a_sweep_with_a_point_that_cannot_run_starts_none(tmp_path: Path) -> None:
    done = run(*TRAIN, "-m", "optimizer.lr=-1,1e-3,inf", *TINY, f"hydra.sweep.dir={tmp_path}/sweep", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    first, *points = done.stderr.splitlines()
    assert first == "error: 2 of 3 points cannot run, nothing was started:"
    assert [" ".join(point.split()) for point in points] == [
        "point 0 optimizer.lr=-1 optimizer.lr=-1.0 must be above 0: the reference of AdamW is 5e-4",
        "point 2 optimizer.lr=inf optimizer.lr=inf is not a finite number: give one",
    ]
    assert not (tmp_path / "sweep").exists()


def test_configuration_errors_are_one_line_with_exit_code_2(tmp_path: Path) -> None:
    done = run(*TRAIN, "seed=-1", f"run_dir={tmp_path}/run", check=False)
    assert (done.returncode, done.stderr) == (2, "error: seed=-1 must be in [0, 2^63): give 0 or more\n")
    assert not (tmp_path / "run").exists()
