"""Version of clipx. The package's metadata reads it from here."""

import platform
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def version_text() -> str:
    """Returns what `--version` prints: the versions of clipx, torch, Hydra and Python. Imports none of them."""
    packages = map(_installed, ("torch", "hydra-core"))
    return ", ".join([f"clipx {__version__}", *packages, f"Python {platform.python_version()}"])


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
