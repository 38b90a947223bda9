"""The evaluator linear_probe: a linear classifier of the image features."""

from clipx.config.registry import declare

declare("evaluator", "clipx.extra.linear_probe.evaluator", "linear_probe")
