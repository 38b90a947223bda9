"""SuperCLIP (arXiv:2512.14480): a contrastive loss, and a head on the image trunk that predicts a caption's tokens."""

from clipx.config.registry import declare

declare("objective", "clipx.extra.superclip.spec", "superclip")
