"""Images at their own aspect ratio (NaFlex, arXiv:2502.14786), and the weights of SigLIP 2 NaFlex."""

from clipx.config.registry import declare

declare("model", "clipx.extra.naflex.spec", "naflex")
declare("weights", "clipx.extra.naflex.spec", "siglip2")
