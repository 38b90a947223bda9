"""Command lines of open_clip's trainer: what to write in place of its flags."""

from clipx.config.registry import declare

declare("other_trainer", "clipx.extra.open_clip.command_line", "open_clip")
