"""The version of clipx, which the package's metadata reads from here."""

__version__ = "0.1.0"
