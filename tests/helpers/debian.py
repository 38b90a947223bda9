"""Debian packages of programs that tests start: SLURM, a browser, a compiler.

PYTHONPATH=tests python -m helpers.debian      installs those that are missing, as root
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

INSTALL = "PYTHONPATH=tests python -m helpers.debian installs it, as root on Debian"
_PACKAGES = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge",
    "slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core", "my_print_defaults": "mariadb-client-core",
    "chromium": "chromium", "gcc": "build-essential",
}  # fmt: skip
_NO_START = Path("/usr/sbin/policy-rc.d")


def install() -> None:
    """Installs missing packages without starting their services. Raises RuntimeError if that fails."""
    missing = sorted(package for program, package in _PACKAGES.items() if shutil.which(program) is None)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"{', '.join(missing)} are not installed, which takes root and Debian's apt-get")
    with _services_stopped():
        _apt_get("update", "-qq")
        _apt_get("install", "-y", "-qq", "--no-install-recommends", *missing)


@contextlib.contextmanager
def _services_stopped() -> Iterator[None]:
    """Blocks the start of services of new packages: Debian asks this program, and 101 means no."""
    if _NO_START.exists():
        yield
        return
    _NO_START.write_text("#!/bin/sh\nexit 101\n")
    _NO_START.chmod(0o755)
    try:
        yield
    finally:
        _NO_START.unlink()


def _apt_get(*words: str) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", *words], env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"apt-get {' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")


if __name__ == "__main__":
    try:
        install()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(str(error))
