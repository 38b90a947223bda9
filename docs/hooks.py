"""Hook of mkdocs: adds the pages of the reference, which are written from the source of clipx."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from reference_pages import pages  # mkdocs imports a hook with its folder on the path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
