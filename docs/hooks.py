"""Hook of mkdocs: adds the pages of the reference, which clipx writes from its source."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from clipx.config import reference
from clipx.config.reference_pages import pages
from clipx_launch import __main__ as sweep

PARSERS = {"clipx_launch": sweep.parser(), "clipx.config.reference": reference.parser()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages(PARSERS).items():
        files.append(File.generated(config, path, content=text))
    return files
