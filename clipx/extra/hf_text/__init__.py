"""Text towers of the package transformers."""

from clipx.config.registry import declare

declare("text", "clipx.extra.hf_text.spec", "hf")
