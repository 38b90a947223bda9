"""`python -m clipx.sweep status|logs|cancel|resume|best|results FOLDER`: what came of a sweep. docs/launch.md."""

from __future__ import annotations

import importlib
import sys

from clipx.config.registry import LAUNCH, launchers


def main() -> None:
    launchers()  # in a checkout another `launch` may be on the path
    sys.exit(importlib.import_module(f"{LAUNCH}.cli").main())


if __name__ == "__main__":
    main()
