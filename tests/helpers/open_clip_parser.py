"""The argument parser of the installed open_clip's trainer."""

from __future__ import annotations

import argparse
from functools import cache

import pytest
from open_clip_train import params


@cache
def open_clip_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of open_clip's trainer."""
    parsers: list[argparse.ArgumentParser] = []

    class Found(Exception):
        pass

    def read(parser: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(parser)
        raise Found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", read)
        with pytest.raises(Found):
            params.parse_args([])
    return parsers[0]


def open_clip_actions() -> dict[str, argparse.Action]:
    """Returns the actions of that parser by their flag, such as --lr."""
    return {action.option_strings[-1]: action for action in open_clip_parser()._actions if action.dest != "help"}
