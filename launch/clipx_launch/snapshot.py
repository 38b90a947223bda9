"""Copies the code for the points of a sweep, so that edits made while they wait do not reach them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from clipx.config import plugins
from clipx.config.registry import CONF_DIR, PACKAGE
from clipx.errors import disk_error
from clipx_launch.files import FIX

_HERE = Path(__file__).parent
_SOURCES = [PACKAGE, _HERE, *([] if CONF_DIR.parent == PACKAGE else [CONF_DIR])]  # a wheel's package holds conf/
MODULE = f"{__package__}.worker"
_GIT_S = 20.0  # time limit of each command of git, which may hang on a dead file system


def environment(folder: Path | None) -> dict[str, str]:
    """Copies the code and the plug-ins of --config-dir to `folder`. Returns environment variables that locate them.

    With folder=None nothing is copied: the processes import the code as it is when they start.
    """
    code = os.pathsep.join(dict.fromkeys(str(package.parent) for package in (PACKAGE, _HERE)))
    plugin_dirs = [Path(name) for name in plugins.__path__ if Path(name).is_dir()]
    if folder is not None:
        code = str(_copy(_SOURCES, folder))
        plugin_dirs = [_copy([path], folder) / path.name for path in plugin_dirs]
    # PYTHONSAFEPATH: the working directory of a job may be the checkout, which would come first on the path.
    return {"PYTHONPATH": code, "PYTHONSAFEPATH": "1", "CLIPX_PLUGINS": os.pathsep.join(map(str, plugin_dirs))}


def _copy(folders: list[Path], to: Path) -> Path:
    """Copies folders into a folder named by their hash, unless it exists already, with `_git_state`. Returns it."""
    found = [(path, path.relative_to(folder.parent)) for folder in folders for path in sorted(folder.rglob("*"))]
    files = {name: path.read_bytes() for path, name in found if path.is_file() and "__pycache__" not in path.parts}
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0".encode() + hashlib.sha256(content).digest())
    target = to / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    partial = to / f".{target.name}.{os.uname().nodename}.{os.getpid()}"
    try:
        for name, content in (files | _git_state(folders)).items():
            copy = partial / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        raise disk_error(error, target, FIX) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _git_state(folders: list[Path]) -> dict[Path, bytes]:
    """Returns files with the git commit of folders, and with their difference from it below the untracked names.

    Empty if git or the repository cannot be used, or does not track each folder.
    """
    names = [str(folder.resolve()) for folder in folders]

    def git(*words: str) -> bytes:
        options = ("--no-optional-locks", "--literal-pathspecs", "-c", "diff.relative=false", "-C", names[0])
        command = ["git", *options, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", "--", *names)  # an installed wheel may be in an ignored folder
        untracked = git("ls-files", "--others", "--exclude=__pycache__", "--full-name", "--", *names)
        diff = git("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", *names)
        commit = git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return {}
    listed = b"".join(b"# untracked: %s\n" % name for name in untracked.splitlines())
    return {Path("git.commit"): commit, Path("git.diff"): listed + diff}
