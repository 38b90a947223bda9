"""Objectives that build on FastCLIP: DRRho-CLIP and NeuCLIP."""

from clipx.config.registry import declare

declare("objective", "clipx.extra.successors.drrho_clip", "drrho_clip")
declare("objective", "clipx.extra.successors.neuclip", "neuclip")
