"""CLIP models of transformers (CLIPModel): their weights, and export to them."""

from clipx.config.registry import declare

declare("weights", "clipx.extra.hf_clip.format", "hf")
