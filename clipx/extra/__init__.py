"""Features in the box, outside the core. A folder is a feature: its options, code, formats of weights and command.

The core imports nothing of it. Each folder is registered as a package of another author is, by the entry points
`clipx.options` and `clipx.commands` in pyproject.toml, and may be deleted.
"""
